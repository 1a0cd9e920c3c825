"""Instructions as functions of Open-Instruct's older verifier name them, in the rows of Tulu 3.

Most are kinds of IFEval with other names of their values. The rest have exact numbers, or "at
least", "at most" and "around".
"""

import re
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, field_validator

from postgrad.rewards.ifeval import form, keywords, length, whole
from postgrad.rewards.ifeval.instruction import Instruction, NonNegative, Text
from postgrad.rewards.ifeval.markup import divided

_DIVIDER = "* * *"
_CAPITALS = re.compile(r"\b[^\W\d_]+\b")
_NEAR = 0.1  # of a number of words, and at least one
Quantifier = Literal["at least", "at most", "around"]


class WordExactly(Instruction):
    """The word occurs exactly N times, in any case, not inside a longer one."""

    word: Text
    N: NonNegative

    def follows(self, text: str) -> bool:
        return len(keywords.whole_word(self.word).findall(text)) == self.N


class LetterExactly(Instruction):
    """The letter occurs exactly N times as it is written, a capital or not."""

    letter: Text
    N: NonNegative

    @field_validator("letter")
    @classmethod
    def _is_one(cls, letter: str) -> str:
        if len(letter) != 1:
            raise ValueError("one character is expected")
        return letter

    def follows(self, text: str) -> bool:
        return text.count(self.letter) == self.N


class ParagraphsBySpacedDivider(Instruction):
    """Exactly N paragraphs with `* * *` between them; a divider may also begin or end it."""

    N: NonNegative

    def follows(self, text: str) -> bool:
        parts = length.paragraphs(text, _DIVIDER)
        return parts is not None and len(parts) == self.N


class WordsAbout(Instruction):
    """At least, at most, or nearly N words between white space."""

    N: NonNegative
    quantifier: Quantifier

    def follows(self, text: str) -> bool:
        return _is_about(len(text.split()), self.quantifier, self.N, _share(self.N))


class SentencesAbout(Instruction):
    """At least, at most, or nearly N sentences: one more or less."""

    N: NonNegative
    quantifier: Quantifier

    def follows(self, text: str) -> bool:
        return _is_about(len(length.sentences(text)), self.quantifier, self.N, 1)


class CapitalWordsAbout(Instruction):
    """At least, at most, or nearly N words in capitals."""

    N: NonNegative
    quantifier: Quantifier

    def follows(self, text: str) -> bool:
        capitals = sum(map(str.isupper, _CAPITALS.findall(text)))
        return _is_about(capitals, self.quantifier, self.N, _share(self.N))


def _listed(options: Any) -> Any:
    return divided(options) if isinstance(options, str) else options


class Choice(Instruction):
    """One of the options occurs as it is written; a text of several is divided as for `options`."""

    options: Annotated[list[Text], BeforeValidator(_listed), Field(min_length=1)]

    def follows(self, text: str) -> bool:
        return any(option in text for option in self.options)


class SectionsExactly(Instruction):
    """Exactly N sections, each started by the splitter."""

    section_splitter: Text
    N: NonNegative

    def follows(self, text: str) -> bool:
        return text.count(self.section_splitter) == self.N


def _share(number: int) -> int:
    return max(round(number * _NEAR), 1)


def _is_about(count: int, quantifier: Quantifier, number: int, near: int) -> bool:
    if quantifier == "around":
        return abs(count - number) <= near
    return count >= number if quantifier == "at least" else count <= number


KINDS: dict[str, type[Instruction]] = {
    "verify_keywords": keywords.Existence,
    "verify_keyword_frequency": WordExactly,
    "validate_forbidden_words": keywords.ForbiddenWords,
    "verify_letter_frequency": LetterExactly,
    "validate_response_language": whole.ResponseLanguage,
    "verify_paragraph_count": ParagraphsBySpacedDivider,
    "validate_word_constraint": WordsAbout,
    "verify_sentence_constraint": SentencesAbout,
    "validate_paragraphs": length.NthParagraphFirstWord,
    "verify_postscript": form.Postscript,
    "validate_placeholders": form.NumberPlaceholders,
    "verify_bullet_points": form.NumberBulletLists,
    "validate_title": form.Title,
    "validate_choice": Choice,
    "validate_highlighted_sections": form.NumberHighlightedSections,
    "validate_sections": SectionsExactly,
    "validate_json_format": form.JsonFormat,
    "validate_repeat_prompt": whole.RepeatPrompt,
    "validate_two_responses": whole.TwoResponses,
    "validate_uppercase": whole.EnglishCapital,
    "validate_lowercase": whole.EnglishLowercase,
    "validate_frequency_capital_words": CapitalWordsAbout,
    "validate_end": whole.EndChecker,
    "validate_quotation": whole.Quotation,
    "validate_no_commas": whole.NoComma,
}
# What values of a function are called by the kind that stands for it.
RENAMED: dict[str, dict[str, str]] = {
    "verify_keywords": {"keyword_list": "keywords"},
    "validate_paragraphs": {"N": "num_paragraphs", "i": "nth_paragraph"},
    "validate_placeholders": {"N": "num_placeholders"},
    "verify_bullet_points": {"N": "num_bullets"},
    "validate_highlighted_sections": {"N": "num_highlights"},
    "validate_repeat_prompt": {"original_prompt": "prompt_to_repeat"},
}
