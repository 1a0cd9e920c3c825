"""Instructions about the form: placeholders, bullets, sections, JSON, title, brackets, hyphens."""

import json
import re
from operator import eq

from postgrad.rewards.ifeval.instruction import Instruction, NonNegative, Text
from postgrad.rewards.ifeval.length import sentences

# Expressions that also match where nothing closes: each character is then looked at once, and a
# response of a hundred thousand brackets takes no quadratic time.
_BRACKET = re.compile(r"\[[^\]\n]*(\]?)")
_EMPHASIS = re.compile(r"\*([^*\n]*)\*")
_STRONG = re.compile(r"\*\*([^*\n]*)\*\*")
_FENCE = re.compile(r"```(?:json)?", re.IGNORECASE)
_POSTSCRIPTS = {"P.S.": r"p\.\s?s\.", "P.P.S": r"p\.\s?p\.\s?s"}
_OPTIONS = ("My answer is yes.", "My answer is no.", "My answer is maybe.")


class NumberPlaceholders(Instruction):
    """At least so many placeholders: `[...]` on one line."""

    num_placeholders: NonNegative

    def follows(self, text: str) -> bool:
        closed = sum(closing == "]" for closing in _BRACKET.findall(text))
        return closed >= self.num_placeholders


class Postscript(Instruction):
    """The marker stands somewhere, in any case; "P.S." and "P.P.S" also with spaces in them."""

    postscript_marker: Text

    def follows(self, text: str) -> bool:
        marker = self.postscript_marker
        pattern = _POSTSCRIPTS.get(marker) or re.escape(marker.lower())
        return re.search(pattern, text.lower()) is not None


class NumberBulletLists(Instruction):
    """Exactly so many bullets: lines that start with `-`, or with one `*` and something more."""

    num_bullets: NonNegative

    def follows(self, text: str) -> bool:
        return sum(map(_is_bullet, text.split("\n"))) == self.num_bullets


class ConstrainedResponse(Instruction):
    """The response contains one of the three answers of the paper, letter by letter."""

    def follows(self, text: str) -> bool:
        return any(option in text for option in _OPTIONS)


class NumberHighlightedSections(Instruction):
    """At least so many highlights: `*...*` or `**...**` on one line, not blank."""

    num_highlights: NonNegative

    def follows(self, text: str) -> bool:
        highlights = _EMPHASIS.findall(text) + _STRONG.findall(text)
        return sum(bool(inner.strip()) for inner in highlights) >= self.num_highlights


class MultipleSections(Instruction):
    """At least so many sections, each started by the splitter and a number."""

    section_spliter: Text  # spelt so in the published data
    num_sections: NonNegative

    def follows(self, text: str) -> bool:
        heads = re.findall(rf"{re.escape(self.section_spliter)}\s?\d", text)
        return len(heads) >= self.num_sections


class JsonFormat(Instruction):
    """The whole response is JSON, with or without a Markdown fence around it."""

    def follows(self, text: str) -> bool:
        body = text.strip()
        fence = _FENCE.match(body)
        body = body[fence.end() if fence else 0 :].removesuffix("```")
        try:
            json.loads(body, parse_int=str)  # a number has as many digits as it wants
        except (ValueError, RecursionError):  # brackets nested too deep for the parser
            return False
        return True


class Title(Instruction):
    """A line has a title that is not blank, as in `<<a title>>`."""

    def follows(self, text: str) -> bool:
        return any(map(_has_title, text.split("\n")))


class SentenceHyphens(Instruction):
    """Sentences with a hyphen and no space between them, and no other hyphen."""

    def follows(self, text: str) -> bool:
        expected = sentences(text.replace("-", " "))
        parts = text.strip().split("-")
        return all(map(eq, parts, expected))


class SquareBrackets(Instruction):
    """Every word, between white space, is in square brackets of its own."""

    def follows(self, text: str) -> bool:
        return all(word[0] == "[" and word[-1] == "]" for word in text.split())


class BigramWrapping(Instruction):
    """Every two words are wrapped, as in `<<two words>> <<and two>>`; a last one may be left."""

    def follows(self, text: str) -> bool:
        words = text.split()
        return all(
            first.startswith("<<") and second.endswith(">>")
            for first, second in zip(words[::2], words[1::2], strict=False)
        )


def _is_bullet(line: str) -> bool:
    line = line.lstrip()
    return line.startswith("-") or (line[:1] == "*" and line[1:2] not in ("", "*"))


def _has_title(line: str) -> bool:
    start, end = line.find("<<"), line.rfind(">>")
    return 0 <= start < end and bool(line[start:end].lstrip("<").rstrip(">").strip())


KINDS: dict[str, type[Instruction]] = {
    "detectable_content:number_placeholders": NumberPlaceholders,
    "detectable_content:postscript": Postscript,
    "detectable_format:number_bullet_lists": NumberBulletLists,
    "detectable_format:constrained_response": ConstrainedResponse,
    "detectable_format:number_highlighted_sections": NumberHighlightedSections,
    "detectable_format:multiple_sections": MultipleSections,
    "detectable_format:json_format": JsonFormat,
    "detectable_format:title": Title,
    "detectable_format:sentence_hyphens": SentenceHyphens,
    "detectable_format:square_brackets": SquareBrackets,
    "detectable_format:bigram_wrapping": BigramWrapping,
}
