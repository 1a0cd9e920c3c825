"""Runs the parts one after the other, each in a process with a limit of its own.

Seconds that a part leaves go to those behind it. A part whose process breaks is started again
behind the case that broke it, as long as cases get done. What runs at its limit is ended, with all
that it started.
"""

import ctypes
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

from benchmarks.gpu.session import PARTS, Session, Store

ROOT = Path(__file__).parents[2]
MINUTES = 9.0  # that SECONDS are meant for; other lengths are divided in the same shares
SECONDS = {"checks": 75.0, "training": 165.0, "decode": 105.0, "step": 115.0, "planner": 30.0}
LEARNING = (60.0, 300.0)  # it takes what is left: at least, at most
CLOSING = 3.0  # for the table
ROOMY = 40 * 2**30  # bytes that models and runs take at most
LOG = "log.txt"
# As parallel.device, which a run sets itself: too late in a process that has used the card before.
ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
PARENT_ENDS = 1  # PR_SET_PDEATHSIG of prctl(2)


def run(session: Session, minutes: float, parts: Sequence[str]) -> None:
    """All parts of the session, within the minutes."""
    store = Store(session.to)
    end = time.time() + 60 * minutes - CLOSING
    for part in parts:
        limit = limit_of(part, parts, end - time.time(), minutes)
        if limit <= 0:
            store.note(part, ended="no minutes were left", limit=0)
            continue
        began = time.time()
        store.note(part, limit=round(limit))
        ended = run_part(replace(session, deadline=began + limit), part, store)
        store.note(part, ended=ended, seconds=round(time.time() - began, 1))
        print(f"{part}: {time.time() - began:.0f} of {limit:.0f} s, {ended}", flush=True)


def limit_of(part: str, parts: Sequence[str], left: float, minutes: float) -> float:
    """Seconds that a part may take of those that are left; not above 0 where it cannot begin.

    Each has its own share, and what the parts before it did not need.
    """
    if part == "learning":
        fewest, most = LEARNING
        fewest *= min(1.0, minutes / MINUTES)
        return min(most, left) if left >= fewest else 0.0
    scale = minutes / MINUTES
    later = sum(SECONDS.get(other, 0.0) * scale for other in parts[parts.index(part) + 1 :])
    return min(left, max(SECONDS[part] * scale, left - later))


def run_part(session: Session, part: str, store: Store) -> str:
    """Starts the part until it has come to its end; how it ended."""
    while True:
        done = len(store.part(part)["cases"])
        status = child(session, part)
        if status == 0:
            return "whole"
        if status is None:
            store.lost(part, "it was under way at the part's limit")
            return "stopped at its limit"
        lost = store.lost(part, f"its process ended with {status_text(status)}: see {LOG}")
        if not lost and len(store.part(part)["cases"]) == done:
            return f"its process ended with {status_text(status)}: see {LOG}"


def status_text(status: int) -> str:
    """An exit status in words."""
    return f"signal {-status}" if status < 0 else f"exit status {status}"


def child(session: Session, part: str) -> int | None:
    """One process of a part: its exit status, None where it was ended at the limit."""
    command = [sys.executable, "-m", "benchmarks.gpu", "--part", part, "--session"]
    with (session.to / LOG).open("a", encoding="utf-8") as log:
        process = subprocess.Popen(
            [*command, session.to_json()],
            cwd=ROOT,
            env=environment(session),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            return process.wait(max(0.1, session.left))
        except subprocess.TimeoutExpired:
            return None
        finally:
            end(process)


def end(process: subprocess.Popen[bytes]) -> None:
    """Ends the process and all that it started."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def end_with_parent() -> None:
    """Called by a child: it is killed when its parent ends, however that ends. Linux only."""
    prctl = getattr(ctypes.CDLL(None), "prctl", None)
    if prctl is not None:
        prctl(PARENT_ENDS, signal.SIGKILL)


def environment(session: Session) -> dict[str, str]:
    """Of the children: the checkout's own packages, no network, caches of the session."""
    paths = [str(ROOT / "src"), str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")]
    changes = {
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "PYTHONUNBUFFERED": "1",
        "HF_HUB_OFFLINE": "1",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "TRANSFORMERS_VERBOSITY": "error",
        "POSTGRAD_CACHE": str(session.scratch / "cache"),
        "POSTGRAD_CALIBRATION": str(session.to / "calibration.toml"),
    }
    if not any(name in os.environ for name in ALLOCATOR):
        changes[ALLOCATOR[0]] = "expandable_segments:True"
    if session.device == "cpu":
        changes["CUDA_VISIBLE_DEVICES"] = ""
    return os.environ | changes


@contextmanager
def scratch() -> Generator[Path]:
    """A folder for models and runs, in memory where there is room: disks would be measured too."""
    memory = Path("/dev/shm")
    roomy = memory.is_dir() and shutil.disk_usage(memory).free >= ROOMY
    folder = Path(tempfile.mkdtemp(prefix="postgrad-gpu-", dir=memory if roomy else None))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def parts_of(names: Sequence[str] | None) -> list[str]:
    """The parts that are asked for, in order of worth."""
    return [part for part in PARTS if names is None or part in names]
