"""Sampling: every engine writes the same number of tokens for every sample."""
