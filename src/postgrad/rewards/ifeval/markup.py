"""IFBench's rules for the form: brackets, quotation marks, lists, lines, emoji, templates."""

import re
import unicodedata
from itertools import pairwise

from pydantic import field_validator

from postgrad.rewards.ifeval.instruction import Instruction, Text, bare, plain
from postgrad.rewards.ifeval.length import ending, sentences, whole_words

_PAIRS = {")": "(", "]": "[", "}": "{"}
_DEEPEST, _QUOTED = 5, 3
_STRAIGHT = str.maketrans("“”„‘’", '"""\'\'')
_APOSTROPHE = re.compile(r"(?<=\w)'(?=\w)")
_OR = re.compile(r"\bor\b")
_FIRST_EMOJI = 0x2190  # symbols before it, such as ©, are text
_JOINERS = "\u200d\ufe0f"
_ITALICS = (("<i>", "</i>"), ("<em>", "</em>"))
_TEMPLATE = ("My Answer:", "My Conclusion:", "Future Outlook:")
_MINOR_WORDS = """
    a an the and but or nor for so yet as at by in of off on per to up via with from
"""
_MINOR = frozenset(_MINOR_WORDS.split())


class NestedBrackets(Instruction):
    """Brackets of any sort are five deep, and the innermost is closed."""

    def follows(self, text: str) -> bool:
        opened: list[str] = []
        deepest = 0
        for character in text:
            if character in "([{":
                opened.append(character)
                deepest = max(deepest, len(opened))
            elif character in _PAIRS:
                if not opened or opened.pop() != _PAIRS[character]:
                    opened, deepest = [], 0
                elif deepest >= _DEEPEST:
                    return True
        return False


class NestedQuotes(Instruction):
    """Double and single quotation marks in turn are three deep, and all three are closed."""

    def follows(self, text: str) -> bool:
        opened: list[str] = []
        deepest = 0
        for character in _APOSTROPHE.sub("", text.translate(_STRAIGHT)):
            if opened and opened[-1] == character:
                opened.pop()
                if deepest - len(opened) >= _QUOTED:
                    return True
            elif character in "\"'":
                opened.append(character)
                deepest = max(deepest, len(opened))
        return False


class QuotesExplained(Instruction):
    """Between a quotation and the next, and behind the last, stands something else."""

    def follows(self, text: str) -> bool:
        joined = "".join(text.translate(_STRAIGHT).split())
        behind = joined.rpartition('"')[2]
        return '""' not in joined and ('"' not in joined or any(map(str.isalpha, behind)))


class OneOfOptions(Instruction):
    """The response is one of the options, which `/`, else `or`, else commas divide.

    In any case and without punctuation around it; where the options are letters, as in `a), b)`,
    exactly as written.
    """

    options: Text

    @field_validator("options")
    @classmethod
    def _are_several(cls, options: str) -> str:
        if len(divided(options)) < 2:
            raise ValueError("two options or more are expected, divided by `/`, `or` or commas")
        return options

    def follows(self, text: str) -> bool:
        options = divided(self.options)
        if all(len(bare(option)) == 1 for option in options):
            return text.strip() in options
        return _edged(text) in map(_edged, options)


class WordPerLine(Instruction):
    """Every word stands on a line of its own."""

    def follows(self, text: str) -> bool:
        return all(len(line.split()) < 2 for line in plain(text).split("\n"))


class EmojiAtEnds(Instruction):
    """Every sentence ends with an emoji, before or behind its mark."""

    def follows(self, text: str) -> bool:
        pieces = [_signs(sentence) for sentence in sentences(text)]
        nexts = [piece[:1] for piece in pieces[1:]] + [""]
        return bool(pieces) and all(
            _is_emoji(piece[-1:]) or _is_emoji(following)
            for piece, following in zip(pieces, nexts, strict=True)
        )


class EqualSentences(Instruction):
    """Three sentences have the same number of characters."""

    def follows(self, text: str) -> bool:
        lengths = [len(sentence) for sentence in sentences(text)]
        return len(lengths) == 3 and len(set(lengths)) == 1


class IndentedStairs(Instruction):
    """Every line that is not blank is indented by more spaces than the one before it."""

    def follows(self, text: str) -> bool:
        lines = [line for line in text.split("\n") if line.strip()]
        return all(a < b for a, b in pairwise(len(line) - len(line.lstrip(" ")) for line in lines))


class SeparatedItems(Instruction):
    """The separator occurs twice or more."""

    sep: Text

    def follows(self, text: str) -> bool:
        return text.count(self.sep) > 1


class ItalicThesis(Instruction):
    """The first text in italics of HTML is not blank, and text comes behind it."""

    def follows(self, text: str) -> bool:
        for start, end in _ITALICS:
            _, opened, rest = text.partition(start)
            if opened:
                thesis, closed, behind = rest.partition(end)
                return bool(closed and thesis.strip() and behind.strip())
        return False


class SubBullets(Instruction):
    """There are bullets, lines with `*`, and below each a line with `-`, before the next one."""

    def follows(self, text: str) -> bool:
        signs = [line.lstrip()[:1] for line in text.split("\n") if not _is_strong(line)]
        marks = "".join(sign for sign in signs if sign in ("*", "-"))
        bullets = marks.split("*")[1:]
        return bool(bullets) and all(bullets)


class SentencesThenBullets(Instruction):
    """Two or more sentences with a full stop, then two or more bullets, lines with `*`, and nothing
    behind them.
    """

    def follows(self, text: str) -> bool:
        lines = [line.strip() for line in text.split("\n") if line.strip()]
        first = next((n for n, line in enumerate(lines) if line.startswith("*")), len(lines))
        before, bullets = lines[:first], lines[first:]
        stops = sum(ending(part) == "." for line in before for part in sentences(line))
        return stops > 1 and len(bullets) > 1 and all(line.startswith("*") for line in bullets)


class TitleCase(Instruction):
    """No word is in lower case; articles, conjunctions and short prepositions may be, but for the
    first word.
    """

    def follows(self, text: str) -> bool:
        words = [word for word in whole_words(text) if word[0].isalpha()]
        rest = [word for word in words[1:] if word not in _MINOR]
        return not any(
            word.islower() or (word[0].islower() and word[1:].isupper())
            for word in (*words[:1], *rest)
        )


class OutputTemplate(Instruction):
    """The response has the three headings of the template."""

    def follows(self, text: str) -> bool:
        return all(heading in text for heading in _TEMPLATE)


class NoWhitespace(Instruction):
    """The response has no white space."""

    def follows(self, text: str) -> bool:
        return not any(map(str.isspace, text))


def divided(options: str) -> list[str]:
    """Options that `/`, else the word `or`, else commas divide."""
    if "/" in options:
        parts = options.split("/")
    else:
        parts = _OR.split(options) if _OR.search(options) else options.split(",")
    return [part.strip() for part in parts]


def _edged(text: str) -> str:
    """In lower case, without what is no letter or digit at its ends."""
    edges = "".join(sign for sign in set(text) if not sign.isalnum())
    return text.strip(edges).lower()


def _signs(sentence: str) -> str:
    """A sentence without white space, punctuation, and what joins and colours emoji."""
    signs = "".join(plain(sentence).split())
    return "".join(
        sign for sign in signs if sign not in _JOINERS and unicodedata.category(sign) != "Sk"
    )


def _is_emoji(sign: str) -> bool:
    return sign != "" and ord(sign) >= _FIRST_EMOJI and unicodedata.category(sign) == "So"


def _is_strong(line: str) -> bool:
    return line.lstrip().startswith("**")


KINDS: dict[str, type[Instruction]] = {
    "format:parentheses": NestedBrackets,
    "format:quotes": NestedQuotes,
    "format:quote_unquote": QuotesExplained,
    "format:options": OneOfOptions,
    "format:newline": WordPerLine,
    "format:emoji": EmojiAtEnds,
    "format:line_indent": IndentedStairs,
    "format:list": SeparatedItems,
    "format:thesis": ItalicThesis,
    "format:sub-bullets": SubBullets,
    "format:no_bullets_bullets": SentencesThenBullets,
    "format:title_case": TitleCase,
    "format:output_template": OutputTemplate,
    "format:no_whitespace": NoWhitespace,
    "ratio:sentence_words": EqualSentences,
}
