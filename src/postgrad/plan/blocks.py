"""Attention's geometry: how many keys are gathered for a query.

The learner's attention on CPUs, and with `model.attention = "sdpa"`, scores runs of QUERY_RUN
queries of one segment over all keys before them (layout.blocks): every run gathers its keys, and a
mask says which are hidden. Flexible attention on GPUs reads keys where they lie.
"""

from dataclasses import dataclass

from postgrad.plan.lengths import RowLengths

STACKED = 1.1  # runs are padded to the longest of their stack: up to 1.3, a tenth as measured
QUERY_RUN = 128  # layout.blocks.QUERY_RUN, which a test holds it to


@dataclass(frozen=True, slots=True)
class Blocks:
    """Means for each computed token. The defaults are those of attention that gathers nothing."""

    keys: float = 1.0  # keys gathered
    scores: float = 0.0  # entries of the mask

    @classmethod
    def of(cls, lengths: RowLengths, answers: int) -> "Blocks":
        """The geometry of a prompt that is computed once for `answers` answers."""
        prompt, answer = lengths.prompt, lengths.answer
        tokens = prompt + answers * answer
        if answers == 1:  # one segment
            prompt, answer, answers = 0.0, tokens, 1
        prompt_keys, prompt_scores = _segment(prompt, 0.0)
        answer_keys, answer_scores = _segment(answer, prompt)
        keys = prompt_keys + answers * answer_keys
        scores = prompt_scores + answers * answer_scores
        return cls(STACKED * keys / tokens, STACKED * scores / tokens)


def _segment(length: float, before: float) -> tuple[float, float]:
    """Keys and scores of all query runs of a segment of `length` tokens, with `before` tokens
    before it.
    """
    keys = scores = start = 0.0
    while start < length:
        end = min(start + QUERY_RUN, length)
        keys += before + end
        scores += (end - start) * (before + end)
        start = end
    return keys, scores
