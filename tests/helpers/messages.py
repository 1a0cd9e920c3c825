"""The messages of a run with samples ahead, and what a kill at each of them would leave."""

import hashlib
import shutil
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from postgrad.checkpoint import files
from postgrad.checkpoint.store import CheckpointStore
from postgrad.core.cursor import Schedule
from postgrad.rollout.local.engine import LocalEngine
from postgrad.training import saving
from postgrad.training.publish import Publisher

MESSAGES: dict[str, tuple[Any, str]] = {
    "ticket admitted": (Schedule, "start"),
    "turn asked": (LocalEngine, "submit"),
    "completions taken": (LocalEngine, "completed"),
    "ticket ended": (Schedule, "end"),
    "step taken": (Schedule, "take"),
    "cut": (LocalEngine, "cut"),
    "published": (Publisher, "__call__"),
    "checkpoint begun": (CheckpointStore, "save"),
    "checkpoint written": (files, "commit"),
    "checkpoint committed": (CheckpointStore, "tidy"),
}


class Disks:
    """A run's folder as it is just before each message: what a process that is killed there leaves,
    because nothing but files outlives it. Messages between which nothing is written share a copy.

    Nothing writes beside the messages: a checkpoint is written when it is asked for, or (late) when
    the run waits for it before the next one. These are the first and the last moment at which the
    thread of a run writes it.
    """

    def __init__(self, run: Path, kept: Path, patch: pytest.MonkeyPatch, *, late: bool) -> None:
        self.names: list[str] = []  # of the messages, in order
        self.copies: dict[str, Path] = {}  # by the hash of the folder, in order
        self._run, self._kept = run, kept
        for name, (owner, method) in MESSAGES.items():
            patch.setattr(owner, method, self._watched(name, getattr(owner, method)))
        patch.setattr(saving, "ThreadPoolExecutor", lambda *_: _Writer(late))

    def _watched(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any, **named: Any) -> Any:
            self.names.append(name)
            self._keep()
            return call(*arguments, **named)

        return run

    def _keep(self) -> None:
        folder = hashlib.sha256()
        for path in sorted(self._run.rglob("*")):
            folder.update(f"{path.relative_to(self._run)}\n".encode())
            if path.is_file():
                folder.update(hashlib.sha256(path.read_bytes()).digest())
        copy = self.copies.setdefault(folder.hexdigest(), self._kept / str(len(self.copies)))
        if not copy.exists():
            shutil.copytree(self._run, copy, symlinks=True)


class _Writer:
    """The thread that writes checkpoints, without a thread."""

    def __init__(self, late: bool) -> None:
        self._late = late

    def submit(self, call: Callable[..., Any], *arguments: Any) -> Future[Any]:
        save = _Save(call, arguments)
        if not self._late:
            save.result()
        return save

    def shutdown(self, wait: bool) -> None:
        assert wait


class _Save(Future[Any]):
    """Written when somebody waits for it."""

    def __init__(self, call: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        super().__init__()
        self._call, self._arguments = call, arguments

    def result(self, timeout: float | None = None) -> Any:
        if not self.done():
            self.set_result(self._call(*self._arguments))
        return super().result(timeout)
