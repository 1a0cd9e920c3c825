"""A reward that any two samples part in, for dry runs: with it there is something to learn from."""

import zlib

from postgrad.rewards.verifier import PromptView, RolloutView


def by_text(prompt: PromptView, rollout: RolloutView) -> float:
    """From 0 to 1, by the sample's text alone: what it is called, not what it is worth."""
    del prompt
    return zlib.crc32(rollout.text.encode()) / 2**32
