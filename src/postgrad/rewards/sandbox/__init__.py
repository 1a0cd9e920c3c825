"""Runs programs that a model wrote in isolation.

`zygote` and what it imports use the standard library only: they run in an interpreter without
site-packages.
"""
