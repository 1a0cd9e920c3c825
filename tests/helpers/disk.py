"""A disk, within this process, whose calls are counted and fail from a chosen one on.

Cheaper than helpers.faults, so that tests may try thousands of histories; it sees what Python does.
"""

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from postgrad.checkpoint import files
from postgrad.checkpoint.store import SaveFailed, Untidy


class Killed(BaseException):
    """The process ended here: nothing catches it."""


def full() -> OSError:
    return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def failing_at(number: int, fails: Callable[[list[str]], BaseException | None]) -> Any:
    """A context in which every call that changes the disk is counted; from call `number` on,
    `fails(calls made)` says what happens instead of it (None: it is made).
    """
    monkeypatch = pytest.MonkeyPatch()
    calls: list[str] = []

    def watch(owner: Any, name: str) -> None:
        call = getattr(owner, name)

        def run(*args: Any, **kwargs: Any) -> Any:
            calls.append(name)
            error = fails(calls) if len(calls) >= number else None
            if error is not None:
                raise error
            return call(*args, **kwargs)

        monkeypatch.setattr(owner, name, run)

    watch(files, "save_file")
    for name in ("mkdir", "rename", "replace", "unlink"):
        watch(Path, name)
    for name in ("fsync", "rmdir", "unlink"):  # rmtree removes a folder entry by entry
        watch(os, name)
    return monkeypatch


def went_well(number: int, save: Callable[[], Any], fails: Any) -> bool:
    """True where the save ended as if nothing had happened."""
    monkeypatch = failing_at(number, fails)
    try:
        save()
    except (Killed, SaveFailed, Untidy):
        return False
    finally:
        monkeypatch.undo()
    return True
