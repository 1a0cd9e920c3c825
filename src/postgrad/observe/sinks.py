"""The log files of a run: JSON lines that are only added to, and cut back to a checkpoint.

Between equal runs only keys that end in _seconds, _bytes or _per_second may differ.
"""

import json
import os
import threading
from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import orjson

from postgrad.core.errors import RunError
from postgrad.core.files import finite
from postgrad.observe.log_file import LogFile

FILES = ("metrics.jsonl", "eval.jsonl", "samples.jsonl", "events.jsonl")


class Logs:
    """Writes the four files of `directory`, from any thread. Lines are there for others at once,
    and on the disk for good with `sync`. On a full disk they wait in memory, which `warn` is told.
    """

    def __init__(self, directory: Path, warn: Callable[[str], None] = lambda text: None) -> None:
        self._directory = directory
        self._warn = warn
        self._files: dict[str, LogFile] = {}
        self._one_at_a_time = threading.Lock()
        self._told = False

    def metric(self, line: Mapping[str, Any]) -> None:
        """One step, to metrics.jsonl."""
        self._write("metrics.jsonl", [line])

    def evaluation(self, line: Mapping[str, Any]) -> None:
        """One evaluation of one set, to eval.jsonl."""
        self._write("eval.jsonl", [line])

    def samples(self, lines: Iterable[Mapping[str, Any]]) -> None:
        """Samples, to samples.jsonl."""
        self._write("samples.jsonl", lines, fast_json)

    def event(self, kind: str, message: str, **more: Any) -> None:
        """What happened, to events.jsonl, with the time of day."""
        at = datetime.now(UTC).isoformat(timespec="milliseconds")
        self._write("events.jsonl", [{"time": at, "event": kind, "message": message, **more}])

    def sync(self) -> dict[str, int]:
        """Puts every line on the disk; returns how many bytes each file has. RunError where the
        disk does not take them.
        """
        with self._one_at_a_time:
            paths = [self._directory / name for name in FILES]
            found = {path.name: path.stat().st_size for path in paths if path.exists()}
            return found | {name: file.sync() for name, file in self._files.items()}

    def rewind(self, offsets: Mapping[str, int]) -> None:
        """Cuts each file back to what a checkpoint knew. Events stay, they happened; one that was
        being written when the run was killed did not.

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
            whole = _whole_lines(path) if size and name == "events.jsonl" else known
            if size > whole:
                os.truncate(path, whole)

    def close(self) -> None:
        """Closes the files; writing opens them again."""
        with self._one_at_a_time:
            for name, file in self._files.items():
                file.flush()
                if file.waiting:
                    self._warn(f"{name}: {file.waiting} bytes were lost on a full disk")
                file.close()
            self._files = {}

    def _write(
        self,
        name: str,
        lines: Iterable[Mapping[str, Any]],
        written: Callable[[Mapping[str, Any]], bytes] = lambda line: encoded(to_json(line)),
    ) -> None:
        data = b"".join(written(line) + b"\n" for line in lines)
        with self._one_at_a_time:
            if name not in self._files:
                self._files[name] = LogFile(self._directory / name)
            file = self._files[name]
            file.add(data)
            file.flush()
            full = any(file.waiting for file in self._files.values())
            if full and not self._told:
                self._warn(
                    f"{self._directory}: the disk is full; log lines wait in memory for room"
                )
            self._told = full


def _whole_lines(path: Path) -> int:
    """Bytes up to the end of the last whole line."""
    return path.read_bytes().rfind(b"\n") + 1


def fast_json(line: Mapping[str, Any]) -> bytes:
    """The same without spaces, in a fifth of the time: of samples there are hundreds a step."""
    try:
        return orjson.dumps(line)
    except TypeError:  # half a surrogate pair, a number beyond 64 bits, one of numpy's
        return encoded(to_json(line))


def encoded(text: str) -> bytes:
    """JSON text as bytes: half a surrogate pair is no UTF-8; as \\ud800 it is JSON."""
    return text.encode(errors="backslashreplace")


def to_json(line: Mapping[str, Any]) -> str:
    """One line of JSON; numbers that are not finite become null, which JSON can say."""
    try:
        return json.dumps(line, ensure_ascii=False, allow_nan=False)
    except ValueError:
        return json.dumps(finite(line), ensure_ascii=False, allow_nan=False)
