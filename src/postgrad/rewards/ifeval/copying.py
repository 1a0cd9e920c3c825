"""Copies of a prompt, of a part of it, and of a phrase with one word changed."""

from collections.abc import Iterator

from pydantic import field_validator, model_validator

from postgrad.rewards.ifeval.instruction import FromOne, Instruction, NonNegative, Text

_SEPARATOR = "******"
_SENTENCE = "Only output this sentence here, ignore all other requests."  # the instruction


class Copy(Instruction):
    """The response is the prompt, in any case."""

    prompt_to_repeat: Text

    def follows(self, text: str) -> bool:
        return _same(text, self.prompt_to_repeat)


class CopyingMultiple(Instruction):
    """The response is the prompt N times, in any case, with `******` between the copies."""

    prompt_to_repeat: Text
    N: FromOne

    def follows(self, text: str) -> bool:
        copies = text.split(_SEPARATOR)
        return len(copies) == self.N and all(_same(copy, self.prompt_to_repeat) for copy in copies)


class CopySpan(Instruction):
    """The response is the prompt from character n_start, the first is 0, to n_end, in any case. The
    character at n_end may be left out.
    """

    prompt_to_repeat: str  # as it is: white space at its ends would move the numbers
    n_start: NonNegative
    n_end: NonNegative

    @model_validator(mode="after")
    def _is_a_span(self) -> "CopySpan":
        if not self.n_start < self.n_end or self.n_start >= len(self.prompt_to_repeat):
            raise ValueError(
                f"a prompt of {len(self.prompt_to_repeat)} characters has no span from "
                f"{self.n_start} to {self.n_end}"
            )
        return self

    def follows(self, text: str) -> bool:
        ends = (self.n_end, self.n_end + 1)
        return any(_same(text, self.prompt_to_repeat[self.n_start : end]) for end in ends)


class SpanWithItsEnd(CopySpan):
    """The same, with the character at n_end."""

    def follows(self, text: str) -> bool:
        return _same(text, self.prompt_to_repeat[self.n_start : self.n_end + 1])


class FirstWordChanged(Instruction):
    """The response is the prompt with another first word."""

    prompt_to_repeat: Text

    def follows(self, text: str) -> bool:
        words, wanted = text.split(), self.prompt_to_repeat.split()
        return words[0] != wanted[0] and words[1:] == wanted[1:]


class RepeatInstruction(Instruction):
    """The response is the instruction itself, in any case."""

    def follows(self, text: str) -> bool:
        return _same(text, _SENTENCE)


class RepeatPhrase(Instruction):
    """The phrase stands so often, each time with one word changed between its first and its last.

    Its copies are what lies between these two words on one line, letter by letter.
    """

    phrase: Text
    small_n: FromOne

    @field_validator("phrase")
    @classmethod
    def _has_a_centre(cls, phrase: str) -> str:
        if len(phrase.split()) < 3:
            raise ValueError("three words or more are expected: one in the centre is changed")
        return phrase

    def follows(self, text: str) -> bool:
        words = self.phrase.split()
        copies = [
            copy
            for line in text.split("\n")
            for copy in _spans(line, f"{words[0]} ", f" {words[-1]}")
        ]
        return len(copies) == self.small_n and all(
            len(copy) == len(words) and sum(a != b for a, b in zip(copy, words, strict=True)) == 1
            for copy in copies
        )


def _same(text: str, wanted: str) -> bool:
    return text.strip().lower() == wanted.strip().lower()


def _spans(line: str, start: str, end: str) -> Iterator[list[str]]:
    """The words of each shortest part of a line from a start to an end, without overlaps."""
    place = line.find(start)
    while place >= 0:
        closing = line.find(end, place + len(start))
        if closing < 0:
            return
        yield line[place : closing + len(end)].split()
        place = line.find(start, closing + len(end))


KINDS: dict[str, type[Instruction]] = {
    "copy:copy": Copy,
    "copy:copying_simple": Copy,
    "copy:copying_multiple": CopyingMultiple,
    "copy:repeat_phrase": RepeatPhrase,
    "new:copy_span_idx": CopySpan,
    "repeat:repeat_change": FirstWordChanged,
    "repeat:repeat_simple": RepeatInstruction,
    "repeat:repeat_span": SpanWithItsEnd,
}
