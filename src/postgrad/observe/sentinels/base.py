"""The base of sentinels: settings with thresholds, and a pure function of a step's metrics.

A sentinel has no state of its own. What it has to remember (a window, a baseline) is JSON that
`look` gets and returns, and that is run state: a resumed run warns as one that never stopped.
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
Seen = Mapping[str, float]  # metric -> value, of a step or of an evaluation
SentinelMemory = Mapping[str, Any]  # JSON that a sentinel remembers


class SentinelStop(RunError):
    """A sentinel with the action "stop" has a message: that of the exception."""


class Acting(Settings):
    """What happens when a sentinel has a message: "off" never looks, "observe" records an event,
    "warn" also prints it, "stop" also ends the run.

    A recipe may give the action in place of the table: `kl = "stop"`.
    """

    action: Action = "warn"

    @model_validator(mode="before")
    @classmethod
    def _action_alone(cls, value: Any) -> Any:
        return {"action": value} if isinstance(value, str) else value


@dataclass(frozen=True, slots=True)
class Look:
    """The result of a sentinel's look at the newest metrics."""

    after: SentinelMemory  # what it remembers from now on
    value: float | None = None  # compared with its limit: metric sentinel/NAME; None: no new metric
    message: str | None = None  # what is wrong and what to do; None: nothing


class InARow(Strict):
    """The memory of most sentinels: how many looks in a row were over the limit."""

    row: Count = 0


class Sentinel(Acting):
    """A check of metrics that are measured anyway.

    remembers: the type of its memory, against which the memory in a checkpoint is validated.
    """

    remembers: ClassVar[Any] = InARow

    @abstractmethod
    def look(self, seen: Seen, before: SentinelMemory) -> Look | None:
        """Checks the metrics `seen`; a pure function.

        before: `after` of the last look, {} at first. None where `seen` lacks the sentinel's
        metrics.
        """


class Level(Sentinel):
    """Speaks while a number has been over `limit` for `steps` looks in a row. NaN is over."""

    limit: float
    steps: int = Field(default=3, ge=1)

    @abstractmethod
    def value(self, seen: Seen) -> float | None:
        """The number to compare with `limit`; None where it was not measured."""

    @abstractmethod
    def tell(self, value: float, seen: Seen) -> str:
        """The message: what is wrong, the numbers, what to do."""

    def look(self, seen: Seen, before: SentinelMemory) -> Look | None:
        value = self.value(seen)
        if value is None:
            return None
        row = in_a_row(before, not value <= self.limit, self.steps)
        message = self.tell(value, seen) if row == self.steps else None
        return Look({"row": row}, message=message)


def in_a_row(before: SentinelMemory, over: bool, most: int) -> int:
    """How many looks in a row were over the limit, counted up to `most`."""
    return min(most, before.get("row", 0) + 1) if over else 0


def measured(seen: Seen, *names: str) -> bool:
    """Whether all the metrics `names` are there and finite, as a window needs them."""
    return all(math.isfinite(seen.get(name, math.nan)) for name in names)


def mean(values: Sequence[float]) -> float:
    """The arithmetic mean of at least one value."""
    return sum(values) / len(values)
