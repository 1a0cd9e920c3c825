"""Sentinels: cheap checks, always on, one a file; each with a threshold and an action."""
