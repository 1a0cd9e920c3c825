"""Sentences of a text, by rule: no model, no word lists but the abbreviations here."""

import re

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
