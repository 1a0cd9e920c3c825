"""Reads metrics.jsonl and eval.jsonl and checks the type of every value."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from postgrad.checkpoint.schema import MOST
from postgrad.core.errors import RunError
from postgrad.core.untrusted import shown
from postgrad.observe.follow import read_lines

LARGEST = 1e300  # so that a sum of many stays finite
COUNTS = ("step", "update", "episodes", "rows", "failed")
NAMES = ("set",)  # text, or null
TABLES = ("margin_histogram",)  # objects


def read_steps(path: Path) -> Iterator[dict[str, Any]]:
    """Every complete line of a log file; each has a `step`.

    Raises RunError that names line and key where a value has the wrong type.
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
    """Whether `value` is a finite int or float below LARGEST; a bool is not."""
    return type(value) in (int, float) and abs(value) < LARGEST


def set_of(line: Mapping[str, Any]) -> str | None:
    """The evaluation set that a line of eval.jsonl is of; None for one without a name."""
    return line.get("set")


_WAY_OUT = "copy the file again from where the run was"


def _wanted(key: str, value: Any) -> str:
    """What `key` should be, for a message; "" where `value` is that."""
    if key in COUNTS:
        fits = type(value) is int and 0 <= value <= MOST
        return "" if fits else "a whole number that is not negative"
    if key in NAMES:
        return "" if value is None or isinstance(value, str) else "a name"
    if key in TABLES:
        return "" if isinstance(value, dict) else "a table"
    return "" if value is None or is_number(value) else "a number"
