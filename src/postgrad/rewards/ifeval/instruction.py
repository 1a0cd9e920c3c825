"""The base class of instructions: arguments from a row, and a rule for the response."""

import string
import unicodedata
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from postgrad.core.settings import Settings


def _stripped(text: str) -> str:
    text = text.strip()
    if not text:
        raise ValueError("a text that is not blank is expected")
    return text


def _only(value: Any) -> Any:
    return value[0] if isinstance(value, list) and len(value) == 1 else value


def _one_word(text: str) -> str:
    if len(text.split()) > 1 or not bare(text):
        raise ValueError("one word is expected")
    return text


Text = Annotated[str, AfterValidator(_stripped)]
# Open-Instruct writes some words as a list of one.
Word = Annotated[Text, BeforeValidator(_only), AfterValidator(_one_word)]
NonNegative = Annotated[int, Field(ge=0)]
FromOne = Annotated[int, Field(ge=1)]
Relation = Literal["at least", "less than"]


class Instruction(Settings):
    """One instruction of a row; its fields are named as in the published data.

    Kinds follow the published checker; docs/rewards.md lists where they decide otherwise.
    """

    def follows(self, text: str) -> bool:
        """Whether `text`, a response that is not blank, follows the instruction."""
        raise NotImplementedError


def holds(count: int, relation: Relation, number: int) -> bool:
    """Whether `count` is "at least" or "less than" `number`."""
    return count >= number if relation == "at least" else count < number


def bare(word: str) -> str:
    """A word without punctuation in or around it, in lower case."""
    return "".join(filter(_is_of_words, word)).lower()


def plain(text: str) -> str:
    """A text without punctuation of any script; words that it joins become one."""
    dropped = {
        ord(sign): None
        for sign in set(text)
        if sign in string.punctuation or unicodedata.category(sign).startswith("P")
    }
    return text.translate(dropped)


def _is_of_words(character: str) -> bool:
    """Whether a word may have it: a letter, digit, underscore, accent or vowel sign."""
    return (
        character.isalnum() or character == "_" or unicodedata.category(character).startswith("M")
    )
