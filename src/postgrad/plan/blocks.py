"""Attention's geometry: how often keys are gathered for the queries that look at them.

The learner's attention on CPUs, and with `model.attention = "sdpa"`, scores runs of QUERY_RUN
queries of one segment over all keys before them (layout.blocks): every run gathers its keys, and a
mask says which are hidden. Flexible attention on GPUs reads keys where they lie.
"""

from dataclasses import dataclass

from postgrad.plan.lengths import Lengths

STACKED = 1.1  # runs are padded to the longest of their stack: up to 1.3, a tenth as measured
QUERY_RUN = 128  # layout.blocks.QUERY_RUN, which a test holds it to


@dataclass(frozen=True, slots=True)
class Blocks:
    """For each computed token, keys that are gathered and scores that are masked: means."""

    keys: float = 1.0
    scores: float = 0.0

    @classmethod
    def of(cls, lengths: Lengths, answers: int) -> "Blocks":
        """Of a prompt that is computed once for `answers` answers."""
        prompt, answer = lengths.prompt, lengths.answer
        tokens = prompt + answers * answer
        if answers == 1:  # one segment
            prompt, answer, answers = 0.0, tokens, 1
        read, masked = _segment(prompt, 0.0)
        own, hidden = _segment(answer, prompt)
        keys, scores = read + answers * own, masked + answers * hidden
        return cls(STACKED * keys / tokens, STACKED * scores / tokens)


def _segment(length: float, before: float) -> tuple[float, float]:
    """Keys and scores of all runs of a segment with so many tokens before it."""
    keys = scores = start = 0.0
    while start < length:
        end = min(start + QUERY_RUN, length)
        keys += before + end
        scores += (end - start) * (before + end)
        start = end
    return keys, scores
