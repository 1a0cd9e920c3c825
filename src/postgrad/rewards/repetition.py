"""A penalty for text that repeats itself."""

from typing import ClassVar

from pydantic import Field

from postgrad.rewards.verifier import PromptView, RolloutView, Score, Verifier


class RepeatedNgrams(Verifier):
    """-penalty * (1 - different n-grams / n-grams) of the response's words, from 0 down to -penalty
    (Yeo et al. 2025, arXiv:2502.03373, as Open-R1 computes it).

    Words are what white space separates, in lower case. A text of fewer than `ngram` words has no
    n-gram and repeats nothing.
    """

    highest: ClassVar[float | None] = 0.0

    ngram: int = Field(default=3, ge=1)  # words
    penalty: float = Field(default=1.0, gt=0.0)  # as if every n-gram were the same

    def score(self, prompt: PromptView, rollout: RolloutView) -> Score:
        words = rollout.text.lower().split()
        ngrams = list(zip(*(words[start:] for start in range(self.ngram)), strict=False))
        repeated = 1.0 - len(set(ngrams)) / len(ngrams) if ngrams else 0.0
        return Score(0.0 - self.penalty * repeated, {"repeated": repeated})
