"""What a logger is: it is told each step once, whole, in order."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

Values = Mapping[str, float]


class Logger(Protocol):
    """One place where curves are drawn. `last`: the newest step that it holds of this run, -1 for
    none; it is not told that step or an older one again.
    """

    last: int

    def log(self, step: int, values: Values) -> None:
        """Every number of a step, under the names of metrics.jsonl; evaluations under eval/NAME."""
        ...

    def close(self) -> None:
        """Everything told is kept."""
        ...


@dataclass(frozen=True, slots=True)
class RunIdentity:
    """What a run is called at its loggers, the same after every resume.

    id: drawn once, part of the run's state. start: the step that this process goes on from; what
    was logged after it belongs to steps that are made again.
    """

    directory: Path
    project: str
    name: str
    id: str
    start: int
    recipe: Mapping[str, Any]
