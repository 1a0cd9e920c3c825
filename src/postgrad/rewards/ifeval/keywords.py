"""Words and letters that a response must have, or must not have."""

import re

from pydantic import Field, field_validator

from postgrad.rewards.ifeval.instruction import Instruction, NonNegative, Relation, Text, holds


class Existence(Instruction):
    """Every keyword occurs, in any case, also inside a longer word."""

    keywords: list[Text] = Field(min_length=1)

    def follows(self, text: str) -> bool:
        return all(occurrences(keyword, text) for keyword in self.keywords)


class Frequency(Instruction):
    """The keyword occurs at least, or less than, so often, in any case, also in longer words."""

    keyword: Text
    frequency: NonNegative
    relation: Relation

    def follows(self, text: str) -> bool:
        return holds(occurrences(self.keyword, text), self.relation, self.frequency)


class ForbiddenWords(Instruction):
    """None of the words occurs as a whole word, in any case."""

    forbidden_words: list[Text] = Field(min_length=1)

    def follows(self, text: str) -> bool:
        return not any(_whole_word(word).search(text) for word in self.forbidden_words)


class LetterFrequency(Instruction):
    """The letter, or any other character, occurs at least, or less than, so often, in any case."""

    letter: Text
    let_frequency: NonNegative
    let_relation: Relation

    @field_validator("letter")
    @classmethod
    def _is_one(cls, letter: str) -> str:
        if len(letter) != 1:
            raise ValueError("one character is expected")
        return letter.lower()

    def follows(self, text: str) -> bool:
        return holds(text.lower().count(self.letter), self.let_relation, self.let_frequency)


def occurrences(keyword: str, text: str) -> int:
    """How often `keyword` stands in `text`, in any case, counted without overlaps."""
    return len(re.findall(re.escape(keyword), text, re.IGNORECASE))


def _whole_word(word: str) -> re.Pattern[str]:
    return re.compile(rf"(?<!\w){re.escape(word)}(?!\w)", re.IGNORECASE)


KINDS: dict[str, type[Instruction]] = {
    "keywords:existence": Existence,
    "keywords:frequency": Frequency,
    "keywords:forbidden_words": ForbiddenWords,
    "keywords:letter_frequency": LetterFrequency,
}
