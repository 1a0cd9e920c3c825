"""Devices, threads, determinism; later meshes, process groups and collectives."""
