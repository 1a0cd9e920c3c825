"""The log files of a run: JSON lines that are only added to, and cut back to a checkpoint.

Between equal runs only keys that end in _seconds, _bytes or _per_second may differ.
"""

import errno
import json
import os
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any

from postgrad.core.errors import RunError
from postgrad.core.files import finite

FILES = ("metrics.jsonl", "eval.jsonl", "samples.jsonl", "events.jsonl")


class Logs:
    """Writes the four files of `directory`. Lines reach the disk with `sync`, at the latest when a
    checkpoint that counts on them is written.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._open: dict[str, IO[bytes]] = {}

    def metric(self, line: Mapping[str, Any]) -> None:
        """One step, to metrics.jsonl, readable by others at once."""
        self._write("metrics.jsonl", [line], flush=True)

    def evaluation(self, line: Mapping[str, Any]) -> None:
        """One evaluation of one set, to eval.jsonl."""
        self._write("eval.jsonl", [line], flush=True)

    def samples(self, lines: Iterable[Mapping[str, Any]]) -> None:
        """Samples, to samples.jsonl."""
        self._write("samples.jsonl", lines, flush=False)

    def event(self, kind: str, message: str, **more: Any) -> None:
        """What happened, to events.jsonl, with the time of day."""
        at = datetime.now(UTC).isoformat(timespec="milliseconds")
        line = {"time": at, "event": kind, "message": message, **more}
        self._write("events.jsonl", [line], flush=True)

    def sync(self) -> dict[str, int]:
        """Puts every line on the disk; returns how many bytes each file has."""
        for file in self._open.values():
            file.flush()
            os.fsync(file.fileno())
        paths = [self._directory / name for name in FILES]
        return {path.name: path.stat().st_size for path in paths if path.exists()}

    def rewind(self, offsets: Mapping[str, int]) -> None:
        """Cuts each file back to what a checkpoint knew; events stay, they happened.

        So no step stands there twice after a kill. A file that is shorter than a checkpoint says
        has lost lines: RunError.
        """
        self.close()
        for name in FILES:
            path = self._directory / name
            size = path.stat().st_size if path.exists() else 0
            known = offsets.get(name, 0)
            if size < known:
                raise RunError(
                    f"{path} has {size} bytes and had {known} when the checkpoint was written: "
                    "lines were lost; put the file back to resume this run"
                )
            if name != "events.jsonl" and size > known:
                os.truncate(path, known)

    def close(self) -> None:
        """Flushes and closes the files; writing opens them again."""
        for file in self._open.values():
            file.close()
        self._open = {}

    def _write(self, name: str, lines: Iterable[Mapping[str, Any]], *, flush: bool) -> None:
        try:
            if name not in self._open:
                self._open[name] = (self._directory / name).open("ab")
            file = self._open[name]
            for line in lines:
                # half a surrogate pair is no UTF-8; as \ud800 it is JSON
                file.write(to_json(line).encode(errors="backslashreplace") + b"\n")
            if flush:
                file.flush()
        except OSError as error:
            full = error.errno in (errno.ENOSPC, errno.EDQUOT)
            what = "the disk is full" if full else str(error)
            raise RunError(
                f"{self._directory / name} cannot be written: {what}; make room and resume the run"
            ) from error


def to_json(line: Mapping[str, Any]) -> str:
    """One line of JSON; numbers that are not finite become null, which JSON can say."""
    try:
        return json.dumps(line, ensure_ascii=False, allow_nan=False)
    except ValueError:
        return json.dumps(finite(line), ensure_ascii=False, allow_nan=False)
