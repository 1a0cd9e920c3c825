"""Rules for the whole response: its beginning and end, its case, its language, no commas."""

import re
import unicodedata
from collections import Counter
from functools import lru_cache

from pydantic import field_validator

from postgrad.core.text import composed, nearest
from postgrad.rewards.ifeval.commonest import COMMONEST, LETTERS
from postgrad.rewards.ifeval.instruction import Instruction, NonNegative, Relation, Text, holds
from postgrad.rewards.ifeval.length import whole_words

# The first word of a letter's Unicode name, and the languages that are written with it. Where there
# is one language, the script decides; else the commonest words do. The first language is what a
# short text without any of them is taken for.
_SCRIPTS: dict[str, tuple[str, ...]] = {
    "LATIN": ("en", "es", "pt", "fr", "de", "it", "pl", "vi", "sw", "fi", "nl", "sv", "tr", "id",
              "ro", "cs"),
    "CYRILLIC": ("ru", "uk", "bg"),
    "ARABIC": ("ar", "fa", "ur"),
    "DEVANAGARI": ("hi", "mr", "ne"),
    "BENGALI": ("bn",),
    "GUJARATI": ("gu",),
    "GURMUKHI": ("pa",),
    "KANNADA": ("kn",),
    "MALAYALAM": ("ml",),
    "TAMIL": ("ta",),
    "TELUGU": ("te",),
    "THAI": ("th",),
    "HEBREW": ("he",),
    "GREEK": ("el",),
    "HANGUL": ("ko",),
    "JAPANESE": ("ja",),
    "CHINESE": ("zh",),
}  # fmt: skip
LANGUAGES = frozenset(code for codes in _SCRIPTS.values() for code in codes)
_KANA = ("HIRAGANA", "KATAKANA")
_KANA_SHARE = 10  # a tenth of kana makes Chinese characters Japanese
_RARELY = 20  # one common word in twenty is the least that running text has
# Vowel signs are no letters to Python: without them Hindi words would fall to pieces.
_WORD = re.compile(
    r"(?:[^\W\d_]|[\u0300-\u036f\u064b-\u0655\u0900-\u0903\u093a-\u094f\u0962\u0963])+"
)

_SEPARATOR = "******"


def base_code(code: str) -> str:
    """A language's code without its country: "zh" of "zh-cn"."""
    return code.lower().partition("-")[0]


def is_written_in(code: str, text: str) -> bool:
    """Whether most letters of `text` are of the language's script and no other language of that
    script has more of its common words in it.

    A text of under 20 words without a common word of any language counts as the first language of
    its script, such as English. A text without letters is in no language.
    """
    code = base_code(code)
    script = main_script(text)
    if script is None or code not in _SCRIPTS.get(script, ()):
        return False
    languages = _SCRIPTS[script]
    if len(languages) == 1:
        return True
    words = Counter(_WORD.findall(composed(text).lower()))
    hits = {language: _hits(language, words) for language in languages}
    if not any(hits.values()):
        return code == languages[0] and words.total() < _RARELY
    return hits[code] == max(hits.values()) and hits[code] >= words.total() // _RARELY


def main_script(text: str) -> str | None:
    """The script of most letters, such as "LATIN"; None where there are no letters."""
    counts: Counter[str] = Counter()
    for character, count in Counter(text).items():
        if character.isalpha():
            counts[_script(character)] += count
    kana = sum(counts.pop(script, 0) for script in _KANA)
    characters = counts.pop("CJK", 0)
    east = "JAPANESE" if kana * _KANA_SHARE >= characters else "CHINESE"
    counts[east] += kana + characters
    script, count = max(counts.items(), key=lambda item: item[1])
    return script if count else None


@lru_cache(maxsize=4096)
def _script(character: str) -> str:
    return re.split("[ -]", unicodedata.name(character, "UNKNOWN"), maxsplit=1)[0]


def _hits(code: str, words: Counter[str]) -> int:
    """Words of the text that are common in the language, or have a letter that only it writes."""
    common, letters = COMMONEST[code], LETTERS.get(code, frozenset())
    return sum(
        count for word, count in words.items() if word in common or not letters.isdisjoint(word)
    )


class TwoResponses(Instruction):
    """Two different responses with `******` between them; one may also begin or end it all."""

    def follows(self, text: str) -> bool:
        parts = [part.strip() for part in text.split(_SEPARATOR)]
        responses = [part for part in parts if part]
        return all(parts[1:-1]) and len(responses) == 2 and responses[0] != responses[1]


class RepeatPrompt(Instruction):
    """The response starts with the prompt, in any case."""

    prompt_to_repeat: Text

    def follows(self, text: str) -> bool:
        return text.strip().lower().startswith(self.prompt_to_repeat.lower())


class EndChecker(Instruction):
    """The response ends with the phrase, in any case; double quotation marks may follow."""

    end_phrase: Text

    def follows(self, text: str) -> bool:
        return text.strip().strip('"').lower().endswith(self.end_phrase.lower())


class Quotation(Instruction):
    """The response is wrapped in double quotation marks."""

    def follows(self, text: str) -> bool:
        text = text.strip()
        return len(text) > 1 and text[0] == text[-1] == '"'


class CapitalWordFrequency(Instruction):
    """At least, or less than, so many words in capitals; I and A are such words too."""

    capital_frequency: NonNegative
    capital_relation: Relation

    def follows(self, text: str) -> bool:
        capitals = sum(map(str.isupper, whole_words(text)))
        return holds(capitals, self.capital_relation, self.capital_frequency)


class EnglishCapital(Instruction):
    """The response is English without a lower-case letter."""

    def follows(self, text: str) -> bool:
        return text.isupper() and is_written_in("en", text)


class EnglishLowercase(Instruction):
    """The response is English without a capital letter."""

    def follows(self, text: str) -> bool:
        return text.islower() and is_written_in("en", text)


class NoComma(Instruction):
    """The response has no comma."""

    def follows(self, text: str) -> bool:
        return "," not in text


class PunctuationDot(Instruction):
    """The response has no full stop, as punctuation or elsewhere."""

    def follows(self, text: str) -> bool:
        return "." not in text


class PunctuationExclamation(Instruction):
    """The response has no exclamation mark."""

    def follows(self, text: str) -> bool:
        return "!" not in text


class ResponseLanguage(Instruction):
    """The response is written in `language`, an ISO 639-1 code."""

    language: Text

    @field_validator("language")
    @classmethod
    def _is_known(cls, code: str) -> str:
        if base_code(code) not in LANGUAGES:
            close = nearest(code, LANGUAGES)
            hint = f"did you mean {close!r}?" if close else f"known: {', '.join(sorted(LANGUAGES))}"
            raise ValueError(f"this language cannot be detected; {hint}")
        return code

    def follows(self, text: str) -> bool:
        return is_written_in(self.language, text)


KINDS: dict[str, type[Instruction]] = {
    "combination:two_responses": TwoResponses,
    "combination:repeat_prompt": RepeatPrompt,
    "startend:end_checker": EndChecker,
    "startend:quotation": Quotation,
    "change_case:capital_word_frequency": CapitalWordFrequency,
    "change_case:english_capital": EnglishCapital,
    "change_case:english_lowercase": EnglishLowercase,
    "punctuation:no_comma": NoComma,
    "punctuation:punctuation_dot": PunctuationDot,
    "punctuation:punctuation_exclamation": PunctuationExclamation,
    "language:response_language": ResponseLanguage,
}
