"""Unicode normalisation in linear time, whatever the text."""

import unicodedata
from itertools import groupby
from typing import Literal

_MARKS = 30
_PAIRS_OF_MARKS = "\u0f73\u0f75\u0f81"  # Tibetan: in class 0, but each decomposes into two marks


def composed(text: str, form: Literal["NFC", "NFKC"] = "NFC") -> str:
    """`text` in a normal form, with at most 30 combining marks in a row.

    That is the limit of the stream-safe text format (Unicode Standard Annex 15): no writing system
    needs more, and sorting a long run of marks takes quadratic time.
    """
    if text.isascii():
        return text
    runs = ((is_mark, "".join(run)) for is_mark, run in groupby(text, _is_mark))
    return unicodedata.normalize(form, "".join(run[:_MARKS] if mark else run for mark, run in runs))


def _is_mark(character: str) -> bool:
    return unicodedata.combining(character) > 0 or character in _PAIRS_OF_MARKS
