"""Lines of metrics.jsonl and eval.jsonl whose numbers are numbers, whoever wrote them."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from postgrad.checkpoint.schema import MOST
from postgrad.core.errors import RunError
from postgrad.core.untrusted import shown
from postgrad.observe.follow import read_lines

LARGEST = 1e300  # a sum of many still is a number
COUNTS = ("step", "update", "episodes", "rows", "failed")
NAMES = ("set",)  # texts, or null
TABLES = ("margin_histogram",)


def read_steps(path: Path) -> Iterator[dict[str, Any]]:
    """Every whole line, with its `step`. Raises RunError that names line and key where a value is
    not what a run writes there.
    """
    for number, line in enumerate(read_lines(path), 1):
        if "step" not in line:
            raise RunError(f"{path}:{number}: it lacks a step; {_WAY_OUT}")
        for key, value in line.items():
            wanted = _wanted(key, value)
            if wanted:
                raise RunError(
                    f"{path}:{number}: {key} is {shown(value)}, where {wanted} is wanted; "
                    f"{_WAY_OUT}"
                )
        yield line


def is_number(value: Any) -> bool:
    """A number that is not out of all bounds; true and false are none."""
    return type(value) in (int, float) and abs(value) < LARGEST


def set_of(line: Mapping[str, Any]) -> str | None:
    """The evaluation set that a line of eval.jsonl is of; None for one without a name."""
    return line.get("set")


_WAY_OUT = "copy the file again from where the run was"


def _wanted(key: str, value: Any) -> str:
    """What should stand there, "" where it does."""
    if key in COUNTS:
        fits = type(value) is int and 0 <= value <= MOST
        return "" if fits else "a whole number that is not negative"
    if key in NAMES:
        return "" if value is None or isinstance(value, str) else "a name"
    if key in TABLES:
        return "" if isinstance(value, dict) else "a table"
    return "" if value is None or is_number(value) else "a number"
