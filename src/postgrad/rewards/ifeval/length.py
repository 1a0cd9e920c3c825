"""How many words, sentences and paragraphs a response has."""

import re
import unicodedata
from functools import lru_cache

from pydantic import field_validator, model_validator

from postgrad.rewards.ifeval.instruction import (
    FromOne,
    Instruction,
    NonNegative,
    Relation,
    Text,
    holds,
)

# A stop is a run of marks with what closes after it, before white space or the end. The mark of a
# script without spaces ends its sentence at once. No run is entered in its middle: a text of dots
# takes no quadratic time.
_STOP = re.compile(
    r"(?<![.?!…])(?P<marks>[.?!…]++)(?P<close>[\"'”’»)\]*_]*+)(?=\s|$)"
    r"|(?<![。！？।॥؟۔])[。！？।॥؟۔]++[」』”’»)\]]*+"
)
_WORD_BEFORE = re.compile(r"\S+$")
_ABBREVIATIONS = """
    mr mrs ms dr prof st gen col sgt capt lt rev hon sen rep gov messrs vs cf ca approx e.g i.e eg
    ie viz al u.s u.k u.n
"""
_BEFORE_NUMBERS = "no nos fig figs vol pp p ch sec art eq"
_AT_ENDS_TOO = """
    etc inc ltd co corp jr sr bros dept est ave blvd a.m p.m d.c ph.d m.d b.a m.a b.sc
    m.sc jan feb mar apr jun jul aug sep sept oct nov dec
"""
_ENUMERATOR = re.compile(r"(?:^|\n)[ \t>*#(\"-]*(?:\d{1,3}(?:\.\d{1,3})*|[A-Za-z]|[ivxIVX]{1,5})$")
_NEVER, _NUMBERED, _WITH_CAPITAL = (
    frozenset(words.split()) for words in (_ABBREVIATIONS, _BEFORE_NUMBERS, _AT_ENDS_TOO)
)
_WINDOW = 40  # characters before a stop that are looked at: no abbreviation is longer

_WORD = re.compile(r"\w+")
_LOWERCASE = re.compile(r"\b[^\W\d_]+\b")
_CLOSING = "\"'”’»)]*_"
_DIVIDER = "***"
_SPACED_DIVIDER = "* * *"
_OPENING = "'\""
_WORD_END = re.compile(r"[.,?!'\"]")


def sentences(text: str) -> list[str]:
    """The sentences of `text`, white space at their ends removed; together they are all of it.

    . ? ! … and their like in other scripts end a sentence where white space or the end follows, a
    line end does not. A piece without a letter or digit belongs to the sentence before it.
    """
    pieces: list[str] = []
    start = 0
    for stop in _STOP.finditer(text):
        if not _ends(text, stop):
            continue
        pieces.append(text[start : stop.end()])
        start = stop.end()
    pieces.append(text[start:])
    return [piece.strip() for piece in _with_words(pieces)]


def _ends(text: str, stop: re.Match[str]) -> bool:
    """Whether a sentence ends at this stop."""
    marks = stop["marks"]
    if marks is None or "?" in marks or "!" in marks:
        return True
    after = text[stop.end() : stop.end() + _WINDOW].lstrip(" \t\n\r\"'“‘«([*_")[:1]
    if marks != ".":  # an ellipsis
        return not after.islower()
    before = text[max(0, stop.start() - _WINDOW) : stop.start()]
    if _ENUMERATOR.search(before) and after:
        return False
    word = _WORD_BEFORE.search(before)
    if word is None:
        return True
    last = word[0].lstrip("\"'“‘«([*_")
    if len(last) == 1 and last.isupper() and last != "I":  # an initial
        return not after
    last = last.lower()
    if last in _NEVER or (last in _NUMBERED and after.isdigit()):
        return not after
    return last not in _WITH_CAPITAL or not after or after.isupper()


def ending(sentence: str) -> str:
    """The last mark of a sentence, without quotation marks and brackets behind it."""
    return sentence.rstrip(_CLOSING)[-1:]


def _with_words(pieces: list[str]) -> list[str]:
    """Pieces without a letter or digit joined to the one before, or to the one after the start."""
    joined: list[str] = []
    lead = ""
    for piece in pieces:
        if any(map(str.isalnum, piece)):
            joined.append(lead + piece)
            lead = ""
        elif joined:
            joined[-1] += piece
        else:
            lead += piece
    return joined


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


def whole_words(text: str) -> list[str]:
    """Words with their hyphens, apostrophes and inner dots: state-of-the-art, don't, U.S."""
    marks = {mark for mark in set(text) if unicodedata.category(mark).startswith("M")}
    return _pattern_of_whole_words("".join(sorted(marks))).findall(text)


@lru_cache(maxsize=64)
def _pattern_of_whole_words(marks: str) -> re.Pattern[str]:
    """With the combining marks that a text has: to Python's \\w they are no part of a word."""
    run = rf"[\w{re.escape(marks)}]++"
    return re.compile(rf"{run}(?:[-'’./&]{run})*+")


def paragraphs(text: str, divider: str) -> list[str] | None:
    """The parts between dividers, one of which may also begin or end the text. None where two
    stand with nothing between them.
    """
    parts = text.split(divider)
    filled = [part for part in parts if part.strip()]
    return filled if all(part.strip() for part in parts[1:-1]) else None


class NumberSentences(Instruction):
    """At least, or less than, so many sentences."""

    num_sentences: NonNegative
    relation: Relation

    def follows(self, text: str) -> bool:
        return holds(len(sentences(text)), self.relation, self.num_sentences)


class NumberWords(Instruction):
    """At least, or less than, so many words: runs of letters, digits and underscores."""

    num_words: NonNegative
    relation: Relation

    def follows(self, text: str) -> bool:
        return holds(len(words(text)), self.relation, self.num_words)


class NumberParagraphs(Instruction):
    """Exactly so many paragraphs with `***` between them; a divider may also begin or end it."""

    num_paragraphs: NonNegative

    def follows(self, text: str) -> bool:
        return _are(paragraphs(text, _DIVIDER), self.num_paragraphs)


class NthParagraphFirstWord(Instruction):
    """Exactly so many paragraphs with a blank line between them, the nth of which starts so."""

    num_paragraphs: FromOne
    nth_paragraph: FromOne
    first_word: Text

    @field_validator("first_word")
    @classmethod
    def _is_one(cls, word: str) -> str:
        if _first_word(word) != word.lower():
            raise ValueError("one word without punctuation is expected")
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


class TwoParagraphs(Instruction):
    """Two paragraphs with `***` between them; a divider may also begin or end it."""

    def follows(self, text: str) -> bool:
        return _are(paragraphs(text, _DIVIDER), 2)


class TwoParagraphsByBlankLine(Instruction):
    """Two paragraphs with one blank line between them; one may also begin or end it."""

    def follows(self, text: str) -> bool:
        return _are(paragraphs(text, "\n\n"), 2)


class CountingComposition(Instruction):
    """Three paragraphs with `***` or `* * *` between them, each of `n_sent` sentences of `n_words`
    words.
    """

    n_sent: FromOne
    n_words: FromOne

    def follows(self, text: str) -> bool:
        parts = paragraphs(text.replace(_SPACED_DIVIDER, _DIVIDER), _DIVIDER)
        return parts is not None and len(parts) == 3 and all(map(self._is_composed, parts))

    def _is_composed(self, paragraph: str) -> bool:
        counts = [len(whole_words(sentence)) for sentence in sentences(paragraph)]
        return counts == [self.n_words] * self.n_sent


class LowercaseCounting(Instruction):
    """At most N words in lower case: runs of letters."""

    N: NonNegative

    def follows(self, text: str) -> bool:
        return sum(map(str.islower, _LOWERCASE.findall(text))) <= self.N


class CountUnique(Instruction):
    """No word occurs twice, in any case."""

    def follows(self, text: str) -> bool:
        words = [word.casefold() for word in whole_words(text)]
        return len(words) == len(set(words))


def _are(parts: list[str] | None, number: int) -> bool:
    return parts is not None and len(parts) == number


KINDS: dict[str, type[Instruction]] = {
    "length_constraints:number_sentences": NumberSentences,
    "length_constraints:number_paragraphs": NumberParagraphs,
    "length_constraints:number_words": NumberWords,
    "length_constraints:nth_paragraph_first_word": NthParagraphFirstWord,
    "paragraphs:paragraphs": TwoParagraphs,
    "paragraphs:paragraphs2": TwoParagraphsByBlankLine,
    "count:counting_composition": CountingComposition,
    "count:lowercase_counting": LowercaseCounting,
    "count:count_unique": CountUnique,
}
