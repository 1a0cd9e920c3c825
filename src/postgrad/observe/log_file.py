"""A file of lines that a full disk, a short write or a signal at any moment cannot tear."""

import errno
import os
from pathlib import Path

from postgrad.core.errors import DiskFull, RunError
from postgrad.core.files import is_full, sync_directory

MOST_WAITING = 2**28  # bytes in memory for a disk that stays full


class LogFile:
    """Adds bytes to the end of a file. What a full disk refuses waits in memory and goes first.

    Bytes are written at a known place, and place and rest change together: a write that a signal
    handler's exception interrupts is made again at the same place, not added twice.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._handle: int | None = None  # until there is something to write
        size = path.stat().st_size if path.exists() else 0
        self._at: tuple[int, bytes] = (size, b"")  # where the rest belongs

    @property
    def waiting(self) -> int:
        """Bytes that the disk did not take yet."""
        return len(self._at[1])

    def add(self, data: bytes) -> None:
        """Puts bytes behind what waits; `flush` writes them."""
        place, rest = self._at
        self._at = (place, rest + data)

    def flush(self) -> None:
        """Writes what waits, unless the disk is full. Raises RunError for any other trouble, and
        where more waits than memory should hold.
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
        """Everything on the disk for good; returns the file's size. Raises DiskFull where lines
        still wait, RunError where fsync fails: only a resume brings back what that lost.
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
        """Closes the file; what still waits is lost."""
        if self._handle is not None:
            os.close(self._handle)


def unwritable(path: Path, error: OSError) -> RunError:
    """What a person is told."""
    if is_full(error):
        return DiskFull(f"{path} cannot be written: the disk is full; make room and resume the run")
    return RunError(f"{path} cannot be written: {error}; resume the run when the disk is well")
