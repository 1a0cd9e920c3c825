"""Runs programs that a model wrote. Nothing here imports more than the standard library, but for
the settings: `zygote` and what it imports run in an interpreter without site-packages."""
