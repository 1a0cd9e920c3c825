"""Instructions whose following a program can check (Zhou et al., 2023, arXiv:2311.07911)."""
