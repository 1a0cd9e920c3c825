"""A log file that a full disk, a short write or a signal at any moment cannot corrupt."""

import errno
import os
from pathlib import Path

from postgrad.core.errors import DiskFull, RunError
from postgrad.core.files import is_full, sync_directory

MOST_WAITING = 2**28  # bytes in memory for a disk that stays full


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
        """Flushes and calls fsync; returns the file's size in bytes.

        Raises DiskFull where bytes still wait, RunError where fsync fails: then bytes may be lost,
        and only a resume writes them again.
        """
        self.flush()
        place, rest = self._at
        if rest:
            raise unwritable(self.path, OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
        try:
            if self._handle is not None:
                os.fsync(self._handle)
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
    return RunError(f"{path} cannot be written: {error}; resume the run when the disk is well")
