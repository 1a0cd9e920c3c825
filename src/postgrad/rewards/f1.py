"""Words in common with a reference answer: the F1 of SQuAD (Rajpurkar et al., 2016)."""

import json
import re
import string
from collections import Counter
from typing import Any, cast

from postgrad.rewards.patterns import Pattern, extract
from postgrad.rewards.verifier import PromptView, RolloutView, Score, Verifier

_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ARTICLES = re.compile(r"\b(a|an|the)\b")


def words(text: str) -> list[str]:
    """In lower case, without punctuation and English articles, split at white space."""
    return _ARTICLES.sub(" ", text.lower().translate(_NO_PUNCTUATION)).split()


def f1(answer: str, reference: str) -> float:
    """2pr / (p + r) over words with their counts; where either has none, 1 if both have none."""
    said, wanted = words(answer), words(reference)
    if not said or not wanted:
        return float(said == wanted)
    common = (Counter(said) & Counter(wanted)).total()
    return 2 * common / (len(said) + len(wanted))


class F1(Verifier):
    """The highest F1 of the sample's answer against any reference answer, from 0 to 1.

    Several reference answers are a JSON list of strings, as the row's answer or in the column
    `references` of it (or a list under "text" there, as in SQuAD). `pattern` is as in exact_match:
    the answer is the first group of its last match, and a sample without one scores 0.
    """

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
            found: Any = _listed(prompt.answer)
        elif self.references not in prompt.metadata:
            raise ValueError(f"the row has no column {self.references!r}")
        else:
            found = prompt.metadata[self.references]
        if isinstance(found, dict):
            found = cast(dict[str, Any], found).get("text")
        found = [found] if isinstance(found, str) else found
        if not isinstance(found, list) or not found:
            raise ValueError("there is no reference answer")
        references = cast(list[Any], found)
        for one in references:
            if not isinstance(one, str) or not words(one):
                raise ValueError(f"nothing to compare with in the reference answer {one!r}")
        return references


def _listed(answer: str | None) -> Any:
    """The list that an answer is as JSON, else the answer."""
    if answer is None or not answer.lstrip().startswith("["):
        return answer
    try:
        return json.loads(answer)
    except ValueError:  # a text that begins with a bracket
        return answer
