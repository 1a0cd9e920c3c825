"""Verifiers of a response's format: <think> and <answer> tags, or a regular expression that
matches.
"""

import re
from typing import Annotated, ClassVar

from pydantic import AfterValidator, Field, field_validator, model_validator

from postgrad.rewards.verifier import PromptView, RolloutView, Score, Verifier

TAGS = ("think", "answer")


def _compiles(pattern: str) -> str:
    try:
        re.compile(pattern)
    except re.error as error:
        raise ValueError(f"not a regular expression: {error}") from error
    return pattern


Pattern = Annotated[str, AfterValidator(_compiles)]


def extract(pattern: str, text: str) -> str | None:
    """The first group (or whole match) of the pattern's last match; None without a match."""
    last = None
    for match in re.finditer(pattern, text, re.DOTALL):
        last = match
    return None if last is None else last[1 if last.re.groups else 0]


class Format(Verifier):
    """1 where the sample is <think>...</think> <answer>...</answer>, else 0 and why in its detail.

    Each of `tags` opens and closes exactly once, in order, one after the other, with white space at
    most outside of them. `opened` says that the prompt already ends with the first tag. `pattern`
    asks for another structure: a regular expression that the whole sample matches (. matches line
    ends too). One that backtracks without end uses up the CPU limit: a recorded failure.
    """

    highest: ClassVar[float | None] = 1.0

    tags: tuple[str, ...] = Field(default=TAGS, min_length=1)  # names, without brackets
    opened: bool = False
    outside: bool = False  # text outside of the tags is allowed
    pattern: Pattern | None = None

    @field_validator("tags")
    @classmethod
    def _names(cls, tags: tuple[str, ...]) -> tuple[str, ...]:
        for tag in tags:
            if not re.fullmatch(r"[^<>/\s]+", tag):
                raise ValueError(f"{tag!r}: a tag is named without <, >, / and white space")
        if len(set(tags)) < len(tags):
            raise ValueError("a tag is listed twice")
        return tags

    @model_validator(mode="after")
    def _one_structure(self) -> "Format":
        if self.pattern is not None and (self.tags != TAGS or self.opened or self.outside):
            raise ValueError("pattern replaces tags, opened and outside: set either it or them")
        return self

    def score(self, prompt: PromptView, rollout: RolloutView) -> Score:
        if self.pattern is not None:
            match = re.fullmatch(self.pattern, rollout.text, re.DOTALL)
            return Score(float(match is not None))
        fault = self._fault(rollout.text)
        return Score(float(fault is None), {"fault": fault})

    def _fault(self, text: str) -> str | None:
        end = 0
        for number, tag in enumerate(self.tags):
            for mark in (f"<{tag}>", f"</{tag}>"):
                in_prompt = mark == f"<{tag}>" and number == 0 and self.opened
                count = text.count(mark) + in_prompt
                if count != 1:
                    return f"{mark} occurs {count} times" if count else f"no {mark}"
                if in_prompt:
                    continue
                start = text.index(mark)
                if start < end:
                    return f"{mark} comes too early"
                between = mark == f"<{tag}>"
                if between and not self.outside and text[end:start].strip():
                    return f"text before {mark}"
                end = start + len(mark)
        if not self.outside and text[end:].strip():
            return f"text after </{self.tags[-1]}>"
        return None


class Regex(Verifier):
    """1 where the sample has a match of `pattern`, else 0; with `absent` the other way round.

    The score's detail has the first match. A pattern that backtracks without end uses up the CPU
    limit: a recorded failure.
    """

    highest: ClassVar[float | None] = 1.0

    pattern: Pattern
    absent: bool = False
    ignore_case: bool = False
    multiline: bool = False  # ^ and $ match at every line
    dot_all: bool = False  # . matches a line's end too

    def score(self, prompt: PromptView, rollout: RolloutView) -> Score:
        flags = re.IGNORECASE if self.ignore_case else re.NOFLAG
        flags |= re.MULTILINE if self.multiline else re.NOFLAG
        flags |= re.DOTALL if self.dot_all else re.NOFLAG
        match = re.search(self.pattern, rollout.text, flags)
        right = (match is None) is self.absent
        return Score(float(right), {"match": None if match is None else match[0][:200]})
