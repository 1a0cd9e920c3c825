"""All external loggers of a run. They get the same values, and no failure of theirs ends a run."""

import importlib
import importlib.util
import math
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from postgrad.core.errors import UsageError
from postgrad.observe.follow import read_steps, set_of
from postgrad.observe.loggers.base import Logger, RunIdentity, Values
from postgrad.observe.settings import LoggerName

ADAPTERS: Mapping[LoggerName, str] = {  # name, also of the package that it needs -> class
    "tensorboard": "TensorBoard",
    "wandb": "WandB",
    "trackio": "Trackio",
    "mlflow": "MLflow",
}
PLACE = ("step", "update", "set", "evaluate_seconds")  # keys of eval.jsonl that are no results
Tell = Callable[[str], None]


def require_installed(names: Sequence[LoggerName]) -> None:
    """Raises UsageError for a logger whose package is not installed."""
    missing = [name for name in names if importlib.util.find_spec(name) is None]
    if missing:
        raise UsageError(
            f"observe.loggers: {missing[0]!r} needs a package that is not installed: "
            f"pip install 'postgrad[{','.join(missing)}]'"
        )


def new_id() -> str:
    """A random id, drawn once for a run. No seed sets it: two runs of a recipe are two curves."""
    return secrets.token_hex(4)


class Loggers:
    """Passes the values of metrics.jsonl and eval.jsonl to every logger.

    A logger that fails is left out from then on, and `tell` is called once with a message: an
    external network or disk ends no run.
    """

    def __init__(self, tell: Tell = lambda text: None) -> None:
        self._tell = tell
        self._loggers: dict[str, Logger] = {}

    def open(self, names: Sequence[LoggerName], run: RunIdentity) -> None:
        """Starts loggers and logs the recorded steps that each one lacks: all of them where it is
        new to the run, the newest ones where a kill lost them.
        """
        for name in names:

            def start(name: LoggerName = name) -> None:
                module = importlib.import_module(f"postgrad.observe.loggers.{name}")
                self._loggers[name] = getattr(module, ADAPTERS[name])(run)

            self._try(name, start)
        for step, values in recorded(run.directory) if self._loggers else ():
            self.log(step, values)

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        """Logs a complete step: its metrics, and its evaluation where there was one."""
        drawable = numbers(values)
        for name, logger in list(self._loggers.items()):
            if step > logger.last:
                self._try(name, lambda logger=logger: logger.log(step, drawable))

    def close(self) -> None:
        """Closes every logger, so that each stores what it has."""
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
                with suppress(Exception):  # its failure is reported already
                    logger.close()


def numbers(values: Mapping[str, Any]) -> dict[str, float]:
    """The values that can be plotted: finite numbers, without the step itself."""
    return {
        name: float(value)
        for name, value in values.items()
        if isinstance(value, int | float) and math.isfinite(value) and name != "step"
    }


def recorded(directory: Path) -> Iterator[tuple[int, Values]]:
    """(step, metrics and evaluation) of every complete step in a run's log files, in order."""
    steps: dict[int, dict[str, Any]] = {}
    for line in read_steps(directory / "metrics.jsonl"):
        steps.setdefault(line["step"], {}).update(line)
    for line in read_steps(directory / "eval.jsonl"):
        steps.setdefault(line["step"], {}).update(of_evaluation(line))
    for step in sorted(steps):
        yield step, numbers(steps[step])


def of_evaluation(line: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a line of eval.jsonl under the names eval/SET/METRIC."""
    prefix = "eval/" if set_of(line) is None else f"eval/{set_of(line)}/"
    return {
        prefix + name: value
        for name, value in line.items()
        if name not in PLACE and isinstance(value, int | float)
    }
