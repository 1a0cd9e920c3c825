"""Words in common with a reference answer: the F1 of SQuAD (Rajpurkar et al., 2016)."""

import re
import string
from collections import Counter
from typing import Any, ClassVar, cast

from postgrad.rewards.format import Pattern, extract
from postgrad.rewards.verifier import PromptView, RolloutView, Score, Verifier, listed

_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ARTICLES = re.compile(r"\b(a|an|the)\b")


def words(text: str) -> list[str]:
    """The words of a text in lower case, without punctuation and English articles."""
    return _ARTICLES.sub(" ", text.lower().translate(_NO_PUNCTUATION)).split()


def f1(answer: str, reference: str) -> float:
    """2pr / (p + r) with precision p and recall r over words with their counts.

    Where one of the texts has no words: 1 if neither has any, else 0.
    """
    answer_words, reference_words = words(answer), words(reference)
    if not answer_words or not reference_words:
        return float(answer_words == reference_words)
    common = (Counter(answer_words) & Counter(reference_words)).total()
    return 2 * common / (len(answer_words) + len(reference_words))


class F1(Verifier):
    """The highest F1 of the sample's answer against any reference answer, from 0 to 1.

    Several reference answers are a JSON list of strings, as the row's answer or in the column
    `references` of it (or a list under "text" there, as in SQuAD). `pattern` is as in exact_match:
    the answer is the first group of its last match, and a sample without one scores 0.
    """

    highest: ClassVar[float | None] = 1.0

    pattern: Pattern | None = None
    references: str | None = None

    def check(self, prompt: PromptView) -> str | None:
        try:
            self._references(prompt)
        except ValueError as error:
            return str(error)
        return None

    def right_answer(self, prompt: PromptView) -> str | None:
        return self._references(prompt)[0] if self.pattern is None else None

    def score(self, prompt: PromptView, rollout: RolloutView) -> Score:
        references = self._references(prompt)
        answer = extract(self.pattern, rollout.text) if self.pattern else rollout.text
        if answer is None:
            return Score(0.0, {"answer": None})
        best = max(references, key=lambda reference: f1(answer, reference))
        return Score(f1(answer, best), {"answer": answer[:200], "reference": best[:200]})

    def _references(self, prompt: PromptView) -> list[str]:
        if self.references is None:
            value: Any = listed(prompt.answer)
        elif self.references not in prompt.metadata:
            raise ValueError(f"the row has no column {self.references!r}")
        else:
            value = prompt.metadata[self.references]
        if isinstance(value, dict):
            value = cast(dict[str, Any], value).get("text")
        value = [value] if isinstance(value, str) else value
        if not isinstance(value, list) or not value:
            raise ValueError("there is no reference answer")
        references = cast(list[Any], value)
        for reference in references:
            if not isinstance(reference, str) or not words(reference):
                raise ValueError(f"nothing to compare with in the reference answer {reference!r}")
        return references
