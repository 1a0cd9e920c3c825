"""IFBench's counts and shares: of words, names, numbers, conjunctions, marks, sentence types."""

import re
import string

from pydantic import Field, model_validator

from postgrad.rewards.ifeval.instruction import (
    FromOne,
    Instruction,
    NonNegative,
    Text,
    bare,
)
from postgrad.rewards.ifeval.keywords import occurrences
from postgrad.rewards.ifeval.length import ending, sentences, whole_words, words

_CONJUNCTIONS = frozenset(["for", "and", "nor", "but", "or", "yet", "so"])
# The names that the instruction lists; its rows do not have them.
_NAMES = """
    Emma Liam Sophia Jackson Olivia Noah Ava Lucas Isabella Mason Mia Ethan Charlotte Alexander
    Amelia Benjamin Harper Leo Zoe Daniel Chloe Samuel Lily Matthew Grace Owen Abigail Gabriel Ella
    Jacob Scarlett Nathan Victoria Elijah Layla Nicholas Audrey David Hannah Christopher Penelope
    Thomas Nora Andrew Aria Joseph Claire Ryan Stella Jonathan
"""
_NAME = re.compile(rf"(?<!\w)(?:{'|'.join(_NAMES.split())})(?!\w)")
_PERSONAL = """
    i me my mine myself we us our ours ourselves you your yours yourself yourselves he him his
    himself she her hers herself it its itself they them their theirs themselves
"""
_OTHER_PRONOUNS = """
    this that these those who whom whose which what whoever whomever whatever whichever anybody
    anyone anything everybody everyone everything nobody nothing somebody someone something each
    either neither both all some any none
"""
_PRONOUNS = frozenset((_PERSONAL + _OTHER_PRONOUNS).split())
_PARTS = re.compile(r"['’/&]")
# Function words of English, with what is left of contractions where an apostrophe divides them.
_STOP_WORDS = frozenset(
    (
        _PERSONAL
        + """
    what which who whom this that these those am is are was were be been being have has had having
    do does did doing a an the and but if or because as until while of at by for with about against
    between into through during before after above below to from up down in out on off over under
    again further then once here there when where why how all any both each few more most other some
    such no nor not only own same so than too very can will just should now
    s t d ll m o re ve y don ain aren couldn didn doesn hadn hasn haven isn ma mightn mustn needn
    shan shouldn wasn weren won wouldn
"""
    ).split()
) - {"mine"}
_NUMBER = re.compile(rf"\d(?:[{re.escape(string.punctuation)}]*+\d)*+")
_MARKS = ".,!?;:"
_JAPANESE = re.compile(r"[\u3040-\u30ff\u4e00-\u9fff]")
_CLOSE = 2.0  # percentage points
_TIMES = (1, 2, 3, 5, 7)


class WordCountRange(Instruction):
    """From min_words to max_words words: runs of letters, digits and underscores."""

    min_words: NonNegative
    max_words: NonNegative

    @model_validator(mode="after")
    def _is_a_range(self) -> "WordCountRange":
        if self.min_words > self.max_words:
            raise ValueError(f"min_words = {self.min_words} is above max_words = {self.max_words}")
        return self

    def follows(self, text: str) -> bool:
        return self.min_words <= len(words(text)) <= self.max_words


class UniqueWordCount(Instruction):
    """At least N different words, in any case, without punctuation around them."""

    N: NonNegative

    def follows(self, text: str) -> bool:
        return len(set(map(bare, text.split())) - {""}) >= self.N


class StopWords(Instruction):
    """At most this percentage of the words are function words of English."""

    percentage: float = Field(ge=0.0)

    def follows(self, text: str) -> bool:
        counted = words(text.lower())
        stops = sum(word in _STOP_WORDS for word in counted)
        return bool(counted) and 100.0 * stops <= self.percentage * len(counted)


class Conjunctions(Instruction):
    """At least small_n different coordinating conjunctions, in any case."""

    small_n: NonNegative

    def follows(self, text: str) -> bool:
        return len(_CONJUNCTIONS & set(map(bare, text.split()))) >= self.small_n


class PersonNames(Instruction):
    """At least N different names of the list."""

    N: NonNegative

    def follows(self, text: str) -> bool:
        return len(set(_NAME.findall(text))) >= self.N


class Pronouns(Instruction):
    """At least N pronouns of English; those in contractions, such as it's, count."""

    N: NonNegative

    def follows(self, text: str) -> bool:
        parts = (_PARTS.split(word)[0] for word in whole_words(text.lower().replace("/", " ")))
        return sum(part in _PRONOUNS for part in parts) >= self.N


class Numbers(Instruction):
    """Exactly N numbers: digits, and what punctuation joins to them."""

    N: NonNegative

    def follows(self, text: str) -> bool:
        return len(_NUMBER.findall(text)) == self.N


class PunctuationCover(Instruction):
    """All of . , ! ? ; : and besides them an interrobang: ?! or !? or ‽."""

    def follows(self, text: str) -> bool:
        first = next((mark for mark in ("?!", "!?", "‽") if mark in text), None)
        return first is not None and set(_MARKS) <= set(text.replace(first, "", 1))


class JapaneseWords(Instruction):
    """Every Nth word, a number excepted, has a character of Japanese."""

    N: FromOne

    def follows(self, text: str) -> bool:
        chosen = map(bare, text.split()[self.N - 1 :: self.N])
        return all(_JAPANESE.search(word) for word in chosen if word and not word.isdigit())


class KeywordsMultiple(Instruction):
    """The keywords occur 1, 2, 3, 5 and 7 times, in any case, also in longer words."""

    keyword1: Text
    keyword2: Text
    keyword3: Text
    keyword4: Text
    keyword5: Text

    def follows(self, text: str) -> bool:
        keywords = (self.keyword1, self.keyword2, self.keyword3, self.keyword4, self.keyword5)
        return tuple(occurrences(keyword, text) for keyword in keywords) == _TIMES


class TrigramOverlap(Instruction):
    """This percentage, by 2 more or less, of the different runs of three characters are in the
    reference text too.
    """

    reference_text: Text
    percentage: float = Field(ge=0.0)

    def follows(self, text: str) -> bool:
        runs = _trigrams(text)
        if not runs:
            return False
        share = 100.0 * len(runs & _trigrams(self.reference_text)) / len(runs)
        return abs(share - self.percentage) <= _CLOSE


class SentenceTypes(Instruction):
    """Twice as many sentences end with a full stop as with a question mark."""

    def follows(self, text: str) -> bool:
        ends = [ending(sentence) for sentence in sentences(text)]
        return ends.count(".") == 2 * ends.count("?")


class SentenceBalance(Instruction):
    """As many sentences end with a full stop as with a question mark, and with an exclamation."""

    def follows(self, text: str) -> bool:
        ends = [ending(sentence) for sentence in sentences(text)]
        return ends.count(".") == ends.count("?") == ends.count("!")


def _trigrams(text: str) -> set[str]:
    return {text[start : start + 3] for start in range(len(text) - 2)}


KINDS: dict[str, type[Instruction]] = {
    "count:word_count_range": WordCountRange,
    "count:unique_word_count": UniqueWordCount,
    "count:conjunctions": Conjunctions,
    "count:person_names": PersonNames,
    "count:pronouns": Pronouns,
    "count:numbers": Numbers,
    "count:punctuation": PunctuationCover,
    "count:words_japanese": JapaneseWords,
    "count:keywords_multiple": KeywordsMultiple,
    "ratio:stop_words": StopWords,
    "ratio:overlap": TrigramOverlap,
    "ratio:sentence_type": SentenceTypes,
    "ratio:sentence_balance": SentenceBalance,
}
