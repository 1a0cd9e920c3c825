"""Whole runs in processes of their own, and what they leave behind."""

import os
import subprocess
import sys
import time
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

MARK = "POSTGRAD_TEST_MARK"  # in the environment of a run and of all that it starts
SECONDS = 900.0  # a machine that is shared
TESTS = Path(__file__).parent.parent


class Ended(NamedTuple):
    code: int
    message: str  # the last line of standard error
    mark: str


def environment(mark: str) -> dict[str, str]:
    """Where tests' own algorithms and rewards can be imported."""
    folders = [str(TESTS), str(TESTS / "helpers"), os.environ.get("PYTHONPATH")]
    return {**os.environ, MARK: mark, "PYTHONPATH": os.pathsep.join(filter(None, folders))}


def postgrad(*words: str, before: Sequence[str] = (), extra: dict[str, str] | None = None) -> Ended:
    """Runs a command to its end. before: words in front of the interpreter."""
    mark = uuid.uuid4().hex
    command = [*before, sys.executable, "-m", "postgrad", *words]
    completed = subprocess.run(
        command, env=environment(mark) | (extra or {}), capture_output=True, text=True,
        timeout=SECONDS, check=False,
    )  # fmt: skip
    messages = [line for line in completed.stderr.splitlines() if line.startswith("postgrad: ")]
    return Ended(completed.returncode, messages[-1] if messages else completed.stderr[-2000:], mark)


def left_of(mark: str) -> list[str]:
    """The command lines of processes with this mark."""
    commands: list[str] = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if f"{MARK}={mark}".encode() in (folder / "environ").read_bytes():
                commands.append((folder / "cmdline").read_bytes().replace(b"\0", b" ").decode())
        except OSError:  # it has ended meanwhile, or is not ours
            continue
    return commands


def all_gone(mark: str) -> list[str]:
    """What is left of a run once its processes had time to end; Ray's end after a moment."""
    end = time.monotonic() + 120.0
    while (left := left_of(mark)) and time.monotonic() < end:
        time.sleep(0.2)
    return left
