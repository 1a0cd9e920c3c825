"""Sinks, console, sentinels."""
