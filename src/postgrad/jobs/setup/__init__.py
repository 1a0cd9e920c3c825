"""Puts a run's parts together: data first, because wrong rows should cost seconds, then weights."""
