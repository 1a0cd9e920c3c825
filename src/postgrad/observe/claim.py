"""A lock on a run directory: one process at a time writes into it."""

import fcntl
import os
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from postgrad.core.errors import UsageError


@contextmanager
def claimed(folder: Path) -> Generator[None]:
    """Locks `folder` until the block or the process ends, however it ends.

    Raises UsageError where another process holds the lock: two that write the same log files would
    destroy both runs. On a file system without locks it does nothing.
    """
    handle = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise UsageError(
                f"another process is running in {folder}: wait until it has ended, or stop it "
                "(SIGTERM saves first)"
            ) from error
        except OSError:  # no locks here
            pass
        yield
    finally:
        os.close(handle)


def require_unclaimed(folder: Path) -> None:
    """Raises UsageError where another process holds the lock. Changes nothing in `folder`."""
    if folder.is_dir():
        with claimed(folder):
            pass
