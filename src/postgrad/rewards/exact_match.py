"""String equality with the reference answer, after the normalisation that the recipe asks for."""

import string
from typing import ClassVar

from postgrad.rewards.format import Pattern, extract
from postgrad.rewards.verifier import PromptView, RolloutView, Score, Verifier, only_answer

_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)


class ExactMatch(Verifier):
    """1 where sample and reference answer are the same string after normalisation, else 0.

    `pattern` is a regular expression whose first group (or whole match) in the sample is the
    answer, the last match where there are several; a sample without a match scores 0.
    """

    highest: ClassVar[float | None] = 1.0

    pattern: Pattern | None = None
    ignore_case: bool = False
    ignore_punctuation: bool = False
    ignore_whitespace: bool = True  # at both ends; runs inside count as one space

    def check(self, prompt: PromptView) -> str | None:
        if prompt.answer is None:
            return "there is no reference answer"
        if "" in self._wanted(prompt):
            return f"nothing is left of the reference answer {prompt.answer!r}"
        return None

    def right_answer(self, prompt: PromptView) -> str | None:
        return prompt.answer if self.pattern is None else None

    def score(self, prompt: PromptView, rollout: RolloutView) -> Score:
        reason = self.check(prompt)
        if reason is not None:
            raise ValueError(reason)
        answer = extract(self.pattern, rollout.text) if self.pattern else rollout.text
        if answer is None:
            return Score(0.0, {"answer": None})
        right = self._normal(answer) in self._wanted(prompt)
        return Score(float(right), {"answer": answer[:200]})

    def _wanted(self, prompt: PromptView) -> set[str]:
        # also as it is: JSON may be what is asked for, and a list of one text is JSON
        return {self._normal(text or "") for text in (prompt.answer, only_answer(prompt.answer))}

    def _normal(self, text: str) -> str:
        if self.ignore_case:
            text = text.casefold()
        if self.ignore_punctuation:
            text = text.translate(_NO_PUNCTUATION)
        return " ".join(text.split()) if self.ignore_whitespace else text
