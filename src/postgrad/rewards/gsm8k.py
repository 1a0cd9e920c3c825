"""GSM8K (Cobbe et al., 2021): the number after the last `####`, compared exactly."""

import re
from decimal import Decimal
from typing import ClassVar

from postgrad.rewards.verifier import PromptView, RolloutView, Score, Verifier, only_answer

# A number neither starts nor ends inside another one: 5,3 or 7/2 or 1e5 is not read as 5, 7 or 1.
_NUMBER = re.compile(
    r"(?<![\w.,)])(?P<sign>[-+\u2212]?)\$?(?P<inner>[-+\u2212]?)"
    r"(?P<digits>(?:[0-9]{1,3}(?:,[0-9]{3})++(?:\.[0-9]++)?+"
    r"|[0-9]++(?:\.[0-9]++)?+|\.[0-9]++))"
    r"(?!,?[0-9]|/[0-9]|[eE][-+]?[0-9])"
)
_MARK = re.compile(r"####[ \t]*")


def marked_number(text: str) -> Decimal | None:
    """The number right after the last `####`; None where that is no number, or no mark is there."""
    marks = list(_MARK.finditer(text))
    match = _NUMBER.match(text, marks[-1].end()) if marks else None
    return _value(match) if match else None


def last_number(text: str) -> Decimal | None:
    """The last number of a text."""
    matches = list(_NUMBER.finditer(text))
    return _value(matches[-1]) if matches else None


def _value(match: re.Match[str]) -> Decimal:
    value = Decimal(match["digits"].replace(",", ""))
    minus = sum(match[group] in ("-", "\u2212") for group in ("sign", "inner"))
    return value.copy_negate() if minus == 1 else value  # a plain minus rounds to 28 digits


class GSM8K(Verifier):
    """1 where the sample's number equals the reference answer's, else 0.

    Numbers may have a sign, a dollar sign, thousands separated by commas, and decimals; 5 equals
    5.00. `flexible` takes the last number of a sample that has no `####` number.
    """

    highest: ClassVar[float | None] = 1.0

    flexible: bool = False

    def check(self, prompt: PromptView) -> str | None:
        if prompt.answer is None:
            return "there is no reference answer"
        if self._reference(prompt.answer) is None:
            return f"no '#### number' in the reference answer {prompt.answer[-80:]!r}"
        return None

    def right_answer(self, prompt: PromptView) -> str | None:
        answer = only_answer(prompt.answer) or ""
        return answer if "####" in answer else f"#### {answer}"

    def score(self, prompt: PromptView, rollout: RolloutView) -> Score:
        reason = self.check(prompt)
        if reason is not None:
            raise ValueError(reason)
        answer = marked_number(rollout.text)
        if answer is None and self.flexible:
            answer = last_number(rollout.text)
        right = answer is not None and answer == self._reference(prompt.answer or "")
        return Score(float(right), {"answer": None if answer is None else str(answer)[:80]})

    @staticmethod
    def _reference(stated: str) -> Decimal | None:
        answer = only_answer(stated) or ""
        if "####" in answer:
            return marked_number(answer)
        match = _NUMBER.fullmatch(answer.strip())
        return _value(match) if match else None
