"""How many words, sentences and paragraphs a response has."""

import re
import unicodedata

from pydantic import Field, field_validator, model_validator

from postgrad.rewards.ifeval.instruction import Count, Instruction, Relation, Text, holds
from postgrad.rewards.ifeval.sentences import sentences

_WORD = re.compile(r"\w+")
_DIVIDER = "***"
_OPENING = "'\""
_WORD_END = re.compile(r"[.,?!'\"]")


def words(text: str) -> list[str]:
    """Runs of letters, digits and underscores. Combining marks (accents, vowel signs) are removed
    first: to Python's \\w they are no part of a word, and would end it.
    """
    marks = {
        ord(character): None
        for character in set(text)
        if unicodedata.category(character).startswith("M")
    }
    return _WORD.findall(text.translate(marks))


class NumberSentences(Instruction):
    """At least, or less than, so many sentences."""

    num_sentences: Count
    relation: Relation

    def follows(self, text: str) -> bool:
        return holds(len(sentences(text)), self.relation, self.num_sentences)


class NumberWords(Instruction):
    """At least, or less than, so many words: runs of letters, digits and underscores."""

    num_words: Count
    relation: Relation

    def follows(self, text: str) -> bool:
        return holds(len(words(text)), self.relation, self.num_words)


class NumberParagraphs(Instruction):
    """Exactly so many paragraphs with `***` between them; a divider may also begin or end it."""

    num_paragraphs: Count

    def follows(self, text: str) -> bool:
        blank = [not part.strip() for part in text.split(_DIVIDER)]
        return not any(blank[1:-1]) and blank.count(False) == self.num_paragraphs


class NthParagraphFirstWord(Instruction):
    """Exactly so many paragraphs with a blank line between them, the nth of which starts so."""

    num_paragraphs: int = Field(ge=1)
    nth_paragraph: int = Field(ge=1)
    first_word: Text

    @field_validator("first_word")
    @classmethod
    def _is_one(cls, word: str) -> str:
        if _first_word(word) != word.lower():
            raise ValueError("one word without punctuation is wanted")
        return word.lower()

    @model_validator(mode="after")
    def _exists(self) -> "NthParagraphFirstWord":
        if self.nth_paragraph > self.num_paragraphs:
            raise ValueError(f"there is no paragraph {self.nth_paragraph} of {self.num_paragraphs}")
        return self

    def follows(self, text: str) -> bool:
        paragraphs = [part for part in text.split("\n\n") if part.strip()]
        if len(paragraphs) != self.num_paragraphs:
            return False
        return _first_word(paragraphs[self.nth_paragraph - 1]) == self.first_word


def _first_word(paragraph: str) -> str:
    """The first word in lower case, without quotes before it, up to a punctuation mark in it."""
    word = paragraph.split()[0].lstrip(_OPENING)
    return _WORD_END.split(word)[0].lower()


KINDS: dict[str, type[Instruction]] = {
    "length_constraints:number_sentences": NumberSentences,
    "length_constraints:number_paragraphs": NumberParagraphs,
    "length_constraints:number_words": NumberWords,
    "length_constraints:nth_paragraph_first_word": NthParagraphFirstWord,
}
