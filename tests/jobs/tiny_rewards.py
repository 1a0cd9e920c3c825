"""Rewards of whole runs that last a second."""

from typing import Any


def vowels(prompt: Any, rollout: Any) -> float:
    """The share of vowels among four letters: a model of random letters earns something."""
    return sum(letter in "aeiou" for letter in rollout.text[:4].lower()) / 4


def broken(prompt: Any, rollout: Any) -> float:
    """Fails on every sample."""
    raise ValueError("no score today")
