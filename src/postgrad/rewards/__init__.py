"""Verifiers, their workers, and the mixing of rewards."""
