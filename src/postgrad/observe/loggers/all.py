"""All loggers of a run: told the same, and never the reason that a run ends."""

import importlib
import importlib.util
import math
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from postgrad.core.errors import UsageError
from postgrad.observe.log_lines import read_steps, set_of
from postgrad.observe.loggers.base import Logger, RunIdentity, Values
from postgrad.observe.settings import LoggerName

ADAPTERS: Mapping[LoggerName, str] = {  # name, which is also that of its package -> class
    "tensorboard": "TensorBoard",
    "wandb": "WandB",
    "trackio": "Trackio",
}
PLACE = ("step", "update", "set", "evaluate_seconds")  # of an evaluation, no result of it
Tell = Callable[[str], None]


def require_installed(names: Sequence[LoggerName]) -> None:
    """Raises UsageError for a logger whose package is not there."""
    missing = [name for name in names if importlib.util.find_spec(name) is None]
    if missing:
        raise UsageError(
            f"observe.loggers: {missing[0]!r} needs a package that is not installed: "
            f"pip install 'postgrad[{','.join(missing)}]'"
        )


def new_id() -> str:
    """Drawn once for a run; no seed decides it, since two runs of a recipe are two curves."""
    return secrets.token_hex(4)


class Loggers:
    """Tells every logger what metrics.jsonl is told. One that fails is told of by `tell`, once, and
    left out from then on: a network or a disk of others ends no run.
    """

    def __init__(self, tell: Tell = lambda text: None) -> None:
        self._tell = tell
        self._loggers: dict[str, Logger] = {}

    def open(self, names: Sequence[LoggerName], run: RunIdentity) -> None:
        """Starts loggers, each with what it lacks of the steps up to the one to go on from: all of
        it where the logger is new to the run, the newest lines where a kill took them.
        """
        for name in names:

            def start(name: LoggerName = name) -> None:
                module = importlib.import_module(f"postgrad.observe.loggers.{name}")
                self._loggers[name] = getattr(module, ADAPTERS[name])(run)

            self._try(name, start)
        for step, values in recorded(run.directory) if self._loggers else ():
            self.log(step, values)

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        """A step that is whole: its metrics, and its evaluation where there was one."""
        known = numbers(values)
        for name, logger in list(self._loggers.items()):
            if step > logger.last:
                self._try(name, lambda logger=logger: logger.log(step, known))

    def close(self) -> None:
        """Ends them all."""
        for name, logger in list(self._loggers.items()):
            self._try(name, logger.close)
        self._loggers = {}

    def _try(self, name: str, call: Callable[[], None]) -> None:
        try:
            call()
        except Exception as error:  # noqa: BLE001  # whatever it is, it is not the run's
            logger = self._loggers.pop(name, None)
            self._tell(
                f"the logger {name} failed and is left out until the next resume, which tells it "
                f"what it missed: {type(error).__name__}: {error}"
            )
            if logger is not None:
                with suppress(Exception):  # it is told of already
                    logger.close()


def numbers(values: Mapping[str, Any]) -> dict[str, float]:
    """What can be drawn: finite numbers, but the step itself."""
    return {
        name: float(value)
        for name, value in values.items()
        if isinstance(value, int | float) and math.isfinite(value) and name != "step"
    }


def recorded(directory: Path) -> Iterator[tuple[int, Values]]:
    """Every whole step of a run's own log files, with its evaluation, in order."""
    steps: dict[int, dict[str, Any]] = {}
    for line in read_steps(directory / "metrics.jsonl"):
        steps.setdefault(line["step"], {}).update(line)
    for line in read_steps(directory / "eval.jsonl"):
        steps.setdefault(line["step"], {}).update(of_evaluation(line))
    for step in sorted(steps):
        yield step, numbers(steps[step])


def of_evaluation(line: Mapping[str, Any]) -> dict[str, float]:
    """eval/NAME/METRIC of a line of eval.jsonl, ends of intervals too."""
    prefix = "eval/" if set_of(line) is None else f"eval/{set_of(line)}/"
    return {
        prefix + name: value
        for name, value in line.items()
        if name not in PLACE and isinstance(value, int | float)
    }
