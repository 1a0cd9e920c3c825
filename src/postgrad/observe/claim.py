"""One process at a time writes into a run directory."""

import fcntl
import os
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from postgrad.core.errors import UsageError


@contextmanager
def claimed(folder: Path) -> Generator[None]:
    """`folder` is this process's until the block ends, or the process does, however it ends.

    Raises UsageError where another process has it: two that wrote the same log lines at the same
    places would leave neither run. A file system without locks guards nothing.
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
    """Raises UsageError as `claimed` does; before anything in `folder` is changed."""
    if folder.is_dir():
        with claimed(folder):
            pass
