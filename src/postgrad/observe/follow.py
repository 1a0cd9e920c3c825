"""A file of lines that another process writes: what is new in it, again and again."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

from postgrad.core.errors import RunError
from postgrad.core.untrusted import (
    MOST_DEPTH,
    MOST_LINE_BYTES,
    open_file,
    parse_json,
    read_bytes,
)

REMEMBERED = 512  # bytes before the place that was reached


class Followed:
    """Reads on from where it was. It opens the file for reading and nothing else, so the run that
    writes it never notices.

    A line without its end is being written, or was torn by a kill: it waits. A resumed run cuts its
    files back and writes on, and --overwrite begins anew: then what was read does not stand there
    any more, and `rewritten` says so.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.offset = 0
        self._before = b""  # what stood just before the offset

    def rewritten(self) -> bool:
        """True where other bytes, or none, stand before the place that was reached."""
        if not self.offset:
            return False
        try:
            with open_file(self.path) as file:
                file.seek(self.offset - len(self._before))
                return file.read(len(self._before)) != self._before
        except FileNotFoundError:
            return True

    def lines(self) -> Iterator[tuple[int, bytes]]:
        """Every new whole line and the byte at which it begins."""
        try:
            file = open_file(self.path)
        except FileNotFoundError:
            return
        with file:
            file.seek(self.offset)
            while line := file.readline(MOST_LINE_BYTES):
                if not line.endswith(b"\n"):
                    if len(line) == MOST_LINE_BYTES:
                        raise RunError(
                            f"{self.path}: the line at byte {self.offset} is longer than "
                            f"{MOST_LINE_BYTES} bytes, which no run writes: cut it out"
                        )
                    return
                start = self.offset
                self.offset += len(line)
                self._before = (self._before + line)[-REMEMBERED:]
                yield start, line


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The objects of a file's whole lines; none where it was never written. Raises RunError where a
    line is no JSON object.
    """
    for start, line in Followed(path).lines():
        found = parse(line)
        if found is None:
            raise RunError(
                f"{path}: the line at byte {start} is no JSON object of at most {MOST_DEPTH} "
                "levels: mend it or cut it out"
            )
        yield found


def parse(line: bytes) -> dict[str, Any] | None:
    """The JSON object of a line; None where it is none."""
    try:
        found = parse_json(line)
    except ValueError:
        return None
    return cast(dict[str, Any], found) if isinstance(found, dict) else None


def read_object(path: Path) -> dict[str, Any] | None:
    """The JSON object of a file; None where there is none, or it is not readable as one."""
    try:
        return parse(read_bytes(path))
    except OSError:
        return None
