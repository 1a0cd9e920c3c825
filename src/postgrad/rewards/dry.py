"""A reward for dry runs that differs between any two samples, so that advantages are not 0."""

import zlib

from postgrad.rewards.verifier import PromptView, RolloutView


def by_text(prompt: PromptView, rollout: RolloutView) -> float:
    """A hash of the sample's text, from 0 to 1; it says nothing about quality."""
    del prompt
    return zlib.crc32(rollout.text.encode()) / 2**32
