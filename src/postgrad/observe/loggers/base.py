"""The protocol of loggers: each gets every step once, complete and in order."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

Values = Mapping[str, float]


class Logger(Protocol):
    """A place where curves are plotted.

    last: the newest step of this run that it has, -1 for none; only newer ones are logged.
    """

    last: int

    def log(self, step: int, values: Values) -> None:
        """Logs all numbers of a step by the names of metrics.jsonl; evaluations as eval/NAME."""
        ...

    def close(self) -> None:
        """Ends the run there, after everything logged is stored."""
        ...


@dataclass(frozen=True, slots=True)
class RunIdentity:
    """What loggers know of a run; all but `start` stays the same after a resume."""

    directory: Path  # the run directory
    project: str
    name: str
    id: str  # drawn once, part of the run's state
    start: int  # the step that this process continues from; later ones are logged again
    recipe: Mapping[str, Any]  # resolved, as in recipe.json
