"""Evaluation: sampled answers, pairs, held-out losses, and how results compare."""
