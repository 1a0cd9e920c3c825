"""What a sentinel is: settings that are its thresholds, and a pure look at a step's numbers.

A sentinel keeps nothing itself. What it has to remember (a window, a baseline) it gets and gives
back as JSON, so that it is run state: a resumed run speaks as one that never stopped.
"""

import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from pydantic import Field, model_validator

from postgrad.checkpoint.schema import Count, Strict
from postgrad.core.errors import RunError
from postgrad.core.settings import Settings

Action = Literal["off", "observe", "warn", "stop"]
Seen = Mapping[str, float]  # metrics by name; of a step, or of an evaluation
Memory = Mapping[str, Any]  # JSON


class SentinelStop(RunError):
    """A sentinel whose action is "stop" has spoken; the message is what it said."""


class Acting(Settings):
    """action: "off" does not look, "observe" records, "warn" also tells, "stop" ends the run.

    In a recipe the action alone may stand for the table: `kl = "stop"`.
    """

    action: Action = "warn"

    @model_validator(mode="before")
    @classmethod
    def _action_alone(cls, value: Any) -> Any:
        return {"action": value} if isinstance(value, str) else value


@dataclass(frozen=True, slots=True)
class Look:
    """What a sentinel made of the newest numbers.

    after: what it remembers from now on. value: what it held against its limit, as the metric
    sentinel/NAME; None where the number stands among the metrics anyway. message: None while all is
    well.
    """

    after: Memory
    value: float | None = None
    message: str | None = None


class InARow(Strict):
    """What most sentinels remember: how many looks in a row were over the limit."""

    row: Count = 0


class Sentinel(Acting):
    """One check of numbers that are measured anyway. remembers: the type of what its looks give
    back, which a checkpoint of another hand has to keep to.
    """

    remembers: ClassVar[Any] = InARow

    @abstractmethod
    def look(self, seen: Seen, before: Memory) -> Look | None:
        """`before`: what the last look remembered, {} at first. None where `seen` has nothing for
        this sentinel. Pure.
        """


class Level(Sentinel):
    """Speaks while a number has been over `limit` for `steps` looks in a row. NaN is over."""

    limit: float
    steps: int = Field(default=3, ge=1)

    @abstractmethod
    def value(self, seen: Seen) -> float | None:
        """The number; None where it was not measured."""

    @abstractmethod
    def tell(self, value: float, seen: Seen) -> str:
        """What is wrong, the numbers, what to do."""

    def look(self, seen: Seen, before: Memory) -> Look | None:
        value = self.value(seen)
        if value is None:
            return None
        row = in_a_row(before, not value <= self.limit, self.steps)
        message = self.tell(value, seen) if row == self.steps else None
        return Look({"row": row}, message=message)


def in_a_row(before: Memory, over: bool, most: int) -> int:
    """How many looks in a row were over, counted up to `most`."""
    return min(most, before.get("row", 0) + 1) if over else 0


def measured(seen: Seen, *names: str) -> bool:
    """True where every one of the numbers is there and finite: a window keeps no others."""
    return all(math.isfinite(seen.get(name, math.nan)) for name in names)


def mean(values: Sequence[float]) -> float:
    """Of at least one value."""
    return sum(values) / len(values)
