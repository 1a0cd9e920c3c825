"""Ends a process and its descendants, and reaps them all so that no zombies stay.

A process that loses its parent becomes a child of process 1. In a container that often never waits,
and three zombies stayed for every sandbox that was killed.
"""

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

from postgrad.rewards import cpu

_PR_SET_CHILD_SUBREAPER = 36
_SECONDS = 1.0  # longest wait for killed processes to be gone


def end(process: subprocess.Popen[bytes], group: bool = False) -> int:
    """Kill a child, or its whole group, and wait for it and for what the kernel kills with it.

    Returns its exit status, or minus the signal that ended it.
    """
    under = list(cpu.descendants(process.pid))
    with _adopting():
        if process.returncode is None:  # not reaped: the number is still its own
            (os.killpg if group else os.kill)(process.pid, signal.SIGKILL)
        code = process.wait()
        deadline = time.monotonic() + _SECONDS
        for pid in under:  # parents first: then the next one is a child of this process
            while not _is_reaped(pid) and time.monotonic() < deadline:
                time.sleep(0.001)
    return code


def _is_reaped(pid: int) -> bool:
    try:
        return os.waitpid(pid, os.WNOHANG)[0] == pid
    except ChildProcessError:  # somebody else's, or gone
        return True


@contextlib.contextmanager
def _adopting() -> Iterator[None]:
    """Inside, orphans among the descendants become children of this process (Linux only)."""
    if sys.platform != "linux":
        yield
        return
    prctl = ctypes.CDLL(None).prctl
    prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        yield
    finally:
        prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)
