"""Words and letters that a response must have, or must not have."""

import re

from pydantic import Field, field_validator

from postgrad.rewards.ifeval.instruction import (
    Instruction,
    NonNegative,
    Relation,
    Text,
    bare,
    holds,
)


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
        return not any(whole_word(word).search(text) for word in self.forbidden_words)


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


class WordOnce(Instruction):
    """The keyword occurs exactly once, in any case, also inside a longer word."""

    keyword: Text

    def follows(self, text: str) -> bool:
        return occurrences(self.keyword, text) == 1


class CountIncrementWord(Instruction):
    """The first keyword occurs once and the second twice, in any case, also in longer words."""

    keyword1: Text
    keyword2: Text

    def follows(self, text: str) -> bool:
        return occurrences(self.keyword1, text) == 1 and occurrences(self.keyword2, text) == 2


class ExcludeWordHarder(Instruction):
    """The keyword does not occur as a whole word, in any case."""

    keyword: Text

    def follows(self, text: str) -> bool:
        return whole_word(self.keyword).search(text) is None


class LetterCounting(Instruction):
    """At least, or less than, so many letters of any script."""

    N: NonNegative
    relation: Relation

    def follows(self, text: str) -> bool:
        return holds(sum(map(str.isalpha, text)), self.relation, self.N)


class Palindrome(Instruction):
    """A word of three or more letters reads the same backwards, in any case."""

    def follows(self, text: str) -> bool:
        return any(len(word) > 2 and word == word[::-1] for word in map(bare, text.split()))


def occurrences(keyword: str, text: str) -> int:
    """How often `keyword` stands in `text`, in any case, counted without overlaps."""
    return len(re.findall(re.escape(keyword), text, re.IGNORECASE))


def whole_word(word: str) -> re.Pattern[str]:
    """Finds `word` where no letter, digit or underscore is beside it, in any case."""
    return re.compile(rf"(?<!\w){re.escape(word)}(?!\w)", re.IGNORECASE)


KINDS: dict[str, type[Instruction]] = {
    "keywords:existence": Existence,
    "keywords:frequency": Frequency,
    "keywords:forbidden_words": ForbiddenWords,
    "keywords:letter_frequency": LetterFrequency,
    "keywords:word_once": WordOnce,
    "keywords:word_count_different_numbers": Frequency,
    "keywords:exclude_word_harder": ExcludeWordHarder,
    "keywords:palindrome": Palindrome,
    "letters:letter_counting": LetterCounting,
    "letters:letter_counting2": LetterFrequency,
    "count:count_increment_word": CountIncrementWord,
}
