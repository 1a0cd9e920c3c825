"""Atomic store, run state, retention."""
