"""The base class of instructions: arguments from a row, and a rule for the response."""

from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from postgrad.core.settings import Settings


def _stripped(text: str) -> str:
    text = text.strip()
    if not text:
        raise ValueError("a text that is not blank is expected")
    return text


Text = Annotated[str, AfterValidator(_stripped)]
NonNegative = Annotated[int, Field(ge=0)]
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
