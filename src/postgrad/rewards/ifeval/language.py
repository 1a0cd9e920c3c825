"""Detects the language of a text from its script and its commonest words.

There is no model and no statistics of letters: the word lists of `commonest.py` decide.
"""

import re
import unicodedata
from collections import Counter
from functools import lru_cache

from postgrad.core.text import composed
from postgrad.rewards.ifeval.commonest import COMMONEST, LETTERS

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
