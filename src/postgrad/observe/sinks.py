"""The log files of a run: JSON lines, only appended to, and truncated to a checkpoint at a resume.

Two runs of one recipe may differ only in keys that end in _seconds, _bytes, _per_second or
_time_fraction.
"""

import errno
import json
import os
import shlex
import shutil
import threading
from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import orjson

from postgrad.core.errors import DiskFull, RunError
from postgrad.core.files import COPIED_BYTES, finite, is_full, sync, sync_directory
from postgrad.core.members import SUFFIX, member
from postgrad.core.untrusted import open_file
from postgrad.observe.run_dir import SAMPLES

MOST_WAITING = 2**28  # bytes in memory for a disk that stays full

FILES = (
    *("metrics.jsonl", "eval.jsonl", "events.jsonl", "schedule.jsonl"),
    *(f"{name}{packed}" for name in SAMPLES for packed in ("", SUFFIX)),
)


class LogFile:
    """Appends bytes to a file. Bytes that a full disk refuses wait in memory and are written first.

    Offset and unwritten bytes change together in one assignment: a write that a signal handler's
    exception interrupts is repeated at the same offset, so nothing is written twice.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._handle: int | None = None  # until there is something to write
        size = path.stat().st_size if path.exists() else 0
        self._at: tuple[int, bytes] = (size, b"")  # offset of the unwritten bytes, these bytes

    @property
    def waiting(self) -> int:
        """How many bytes are not written yet."""
        return len(self._at[1])

    def add(self, data: bytes) -> None:
        """Queues bytes; `flush` writes them."""
        place, rest = self._at
        self._at = (place, rest + data)

    def flush(self) -> None:
        """Writes the queued bytes, or keeps them where the disk is full.

        Raises RunError for any other error, and where more than MOST_WAITING bytes wait.
        """
        try:
            if self._handle is None:
                self._handle = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o666)
                sync_directory(self.path.parent)
            while self.waiting:
                place, rest = self._at
                written = os.pwrite(self._handle, rest, place)
                self._at = (place + written, rest[written:])
        except OSError as error:
            if not is_full(error) or self.waiting > MOST_WAITING:
                raise unwritable(self.path, error) from error

    def sync(self) -> int:
        """Flushes the file to the disk; returns its size in bytes.

        Raises DiskFull where bytes still wait, and a run may go on; RunError where that fails:
        then bytes may be lost, and only a resume writes them again.
        """
        self.flush()
        place, rest = self._at
        if rest:
            raise DiskFull(f"{self.path} cannot be written: the disk is full; make room")
        try:
            if self._handle is not None:
                sync(self._handle)
        except OSError as error:
            raise unwritable(self.path, error) from error
        return place

    def close(self) -> None:
        """Closes the file; bytes that still wait are lost."""
        if self._handle is not None:
            os.close(self._handle)


def unwritable(path: Path, error: OSError) -> RunError:
    """The error for a log file that cannot be written, with what to do about it."""
    if is_full(error):
        return DiskFull(f"{path} cannot be written: the disk is full; make room and resume the run")
    return RunError(f"{path} cannot be written: {error}; resume the run when the disk works again")


class Logs:
    """Writes the log files in `directory`, from any thread.

    Lines are visible to other processes at once, and durable after `sync`. On a full disk they wait
    in memory, and `warn` is called with a message.
    """

    def __init__(
        self,
        directory: Path,
        warn: Callable[[str], None] = lambda text: None,
        *,
        compress: bool = False,
    ) -> None:
        """compress: write samples as gzip members. A file that is there already keeps its form."""
        self._directory = directory
        self._warn = warn
        self._compress = compress
        self._files: dict[str, LogFile] = {}
        self._one_at_a_time = threading.Lock()
        self._warned = False

    def metric(self, line: Mapping[str, Any]) -> None:
        """Appends a step to metrics.jsonl."""
        self._write("metrics.jsonl", [line])

    def schedule(self, line: Mapping[str, Any]) -> None:
        """Appends what engines did in a step to schedule.jsonl."""
        self._write("schedule.jsonl", [line])

    def evaluation(self, line: Mapping[str, Any]) -> None:
        """Appends one evaluation of one set to eval.jsonl."""
        self._write("eval.jsonl", [line])

    def samples(self, lines: Iterable[Mapping[str, Any]]) -> None:
        """Appends a step's samples to samples.jsonl, or to samples.jsonl.gz as one member."""
        self._write_samples("samples.jsonl", lines)

    def evaluation_samples(self, lines: Iterable[Mapping[str, Any]]) -> None:
        """Appends an evaluation's samples to eval_samples.jsonl, as `samples` does."""
        self._write_samples("eval_samples.jsonl", lines)

    def event(self, kind: str, message: str, **more: Any) -> None:
        """Appends an event to events.jsonl, with the time (UTC). more: further keys of the line."""
        at = datetime.now(UTC).isoformat(timespec="milliseconds")
        self._write("events.jsonl", [{"time": at, "event": kind, "message": message, **more}])

    def sync(self) -> dict[str, int]:
        """Makes every line durable; returns the size of each file in bytes.

        Raises RunError where the disk does not take them.
        """
        with self._one_at_a_time:
            paths = [self._directory / name for name in FILES]
            sizes = {path.name: path.stat().st_size for path in paths if path.exists()}
            return sizes | {name: file.sync() for name, file in self._files.items()}

    def rewind(self, offsets: Mapping[str, int]) -> None:
        """Truncates each file to its size at a checkpoint, so that no step is logged twice.

        offsets: file name -> size in bytes. Events are kept, since they happened; only one that was
        half written when the run was killed is removed. Raises RunError where a file is shorter
        than its offset: it has lost lines.
        """
        self.close()
        for name in FILES:
            path = self._directory / name
            size = path.stat().st_size if path.exists() else 0
            kept_bytes = offsets.get(name, 0)
            if size < kept_bytes:
                raise RunError(
                    f"{path} has {size} bytes and had {kept_bytes} when the checkpoint was "
                    "written: lines were lost; put the file back to resume this run. If it is gone "
                    f"for good, `postgrad export {shlex.quote(str(self._directory))} --to DIR` "
                    "still writes the model of the checkpoint, from which a new run can start"
                )
            end = _whole_lines(path) if size and name == "events.jsonl" else kept_bytes
            if size > end:
                os.truncate(path, end)

    def close(self) -> None:
        """Closes the files; writing opens them again."""
        with self._one_at_a_time:
            for name, file in self._files.items():
                file.flush()
                if file.waiting:
                    self._warn(f"{name}: {file.waiting} bytes were lost on a full disk")
                file.close()
            self._files = {}

    def _write_samples(self, name: str, lines: Iterable[Mapping[str, Any]]) -> None:
        data = b"".join(fast_json(line) + b"\n" for line in lines)
        packed = f"{name}{SUFFIX}"
        began = next((form for form in (packed, name) if (self._directory / form).exists()), None)
        if (began or (packed if self._compress else name)) == name:
            self._append(name, data)
        elif data:
            self._append(packed, member(data))

    def _write(self, name: str, lines: Iterable[Mapping[str, Any]]) -> None:
        self._append(name, b"".join(encoded(to_json(line)) + b"\n" for line in lines))

    def _append(self, name: str, data: bytes) -> None:
        with self._one_at_a_time:
            if name not in self._files:
                self._files[name] = LogFile(self._directory / name)
            file = self._files[name]
            file.add(data)
            file.flush()
            full = any(file.waiting for file in self._files.values())
            if full and not self._warned:
                self._warn(
                    f"{self._directory}: the disk is full; log lines wait in memory for room"
                )
            self._warned = full


def copy_logs(source: Path, to: Path, offsets: Mapping[str, int]) -> None:
    """Copies each log file up to its size at a checkpoint. The run in `source` may be writing more.

    offsets: file name -> size in bytes. Raises RunError where a file is shorter than its offset: it
    has lost lines; OSError where one cannot be read or written.
    """
    for name in FILES:
        wanted, path = offsets.get(name), source / name
        if wanted is None or not (wanted or path.exists()):
            continue
        if wanted > shutil.disk_usage(to).free:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(to / name))
        with open_file(path, links=False) as log, (to / name).open("xb") as copy:
            while (left := wanted - copy.tell()) and (piece := log.read(min(left, COPIED_BYTES))):
                copy.write(piece)
            if left:
                raise RunError(
                    f"{path} has {copy.tell()} bytes and had {wanted} when the checkpoint was "
                    "written: lines were lost; put the file back, or take another checkpoint"
                )


def _whole_lines(path: Path) -> int:
    """Bytes up to the end of the last complete line."""
    return path.read_bytes().rfind(b"\n") + 1


def fast_json(line: Mapping[str, Any]) -> bytes:
    """One line of JSON without spaces, in a fifth of `to_json`'s time: a step has hundreds."""
    try:
        return orjson.dumps(line)
    except TypeError:  # half a surrogate pair, a number beyond 64 bits, a NumPy number
        return encoded(to_json(line))


def encoded(text: str) -> bytes:
    """JSON text as UTF-8, in which half a surrogate pair is escaped as \\ud800."""
    return text.encode(errors="backslashreplace")


def to_json(line: Mapping[str, Any]) -> str:
    """One line of JSON; numbers that are not finite become null, since JSON has none."""
    try:
        return json.dumps(line, ensure_ascii=False, allow_nan=False)
    except ValueError:
        return json.dumps(finite(line), ensure_ascii=False, allow_nan=False)
