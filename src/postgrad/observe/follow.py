"""Reads a run's files of JSON: lines as they are written (`Followed`), all complete lines, or one
object. Lines of another version, or of a torn write, are checked here.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast

from postgrad.checkpoint.schema import MOST
from postgrad.core.errors import RunError
from postgrad.core.members import open_lines
from postgrad.core.untrusted import (
    MOST_DEPTH,
    MOST_LINE_BYTES,
    parse_json,
    read_bytes,
    shown,
)

REMEMBERED = 512  # bytes before the offset, to notice that a file was rewritten

LARGEST = 1e300  # so that a sum of many stays finite
COUNTS = ("step", "update", "episodes", "rows", "failed")
NAMES = ("set",)  # text, or null
TABLES = ("margin_histogram",)  # objects

_WAY_OUT = "copy the file again from the original run"


class Followed:
    """Reads a file, or its compressed form, on from where it stopped. It only opens the file for
    reading, without a lock. Offsets are in the unpacked content.

    A line without a newline is still being written, or was torn by a kill: it is left for later. A
    resumed run cuts its files back and writes on, and --overwrite starts anew: then `rewritten`
    notices that the bytes before the offset are not those that were read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.offset = 0
        self._before = b""  # what stood just before the offset

    def rewritten(self) -> bool:
        """Whether the bytes before the offset differ from those that were read, or are gone."""
        if not self.offset:
            return False
        try:
            with open_lines(self.path) as file:
                file.seek(self.offset - len(self._before))
                return file.read(len(self._before)) != self._before
        except FileNotFoundError:
            return True

    def lines(self) -> Iterator[tuple[int, bytes]]:
        """(offset in bytes, line) of every new complete line.

        Raises RunError for a line longer than MOST_LINE_BYTES.
        """
        try:
            file = open_lines(self.path)
        except FileNotFoundError:
            return
        with file:
            file.seek(self.offset)
            while line := file.readline(MOST_LINE_BYTES):
                if not line.endswith(b"\n"):
                    if len(line) == MOST_LINE_BYTES:
                        raise RunError(
                            f"{self.path}: the line at byte {self.offset} is longer than "
                            f"{MOST_LINE_BYTES} bytes, which no run writes: remove it"
                        )
                    return
                start = self.offset
                self.offset += len(line)
                self._before = (self._before + line)[-REMEMBERED:]
                yield start, line


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The JSON objects of a file's complete lines; none where the file does not exist.

    Raises RunError where a line is no JSON object.
    """
    for start, line in Followed(path).lines():
        parsed = parse(line)
        if parsed is None:
            raise RunError(
                f"{path}: the line at byte {start} is no JSON object of at most {MOST_DEPTH} "
                "levels: fix or remove it"
            )
        yield parsed


def parse(line: bytes) -> dict[str, Any] | None:
    """The JSON object of a line; None where the line is not a JSON object."""
    try:
        parsed = parse_json(line)
    except ValueError:
        return None
    return cast(dict[str, Any], parsed) if isinstance(parsed, dict) else None


def read_object(path: Path) -> dict[str, Any] | None:
    """The JSON object of a file; None where the file is missing, unreadable or something else."""
    try:
        return parse(read_bytes(path))
    except OSError:
        return None


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
                    f"{path}:{number}: {key} is {shown(value)}, where {wanted} is expected; "
                    f"{_WAY_OUT}"
                )
        yield line


def is_number(value: Any) -> bool:
    """Whether `value` is a finite int or float below LARGEST; a bool is not."""
    return type(value) in (int, float) and abs(value) < LARGEST


def set_of(line: Mapping[str, Any]) -> str | None:
    """The evaluation set that a line of eval.jsonl is of; None for one without a name."""
    return line.get("set")


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
