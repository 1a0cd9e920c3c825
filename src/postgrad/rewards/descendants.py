"""A process and those under it: their CPU time in seconds, and their end, after which none of them
stays in the process table, not even as a zombie.
"""

import contextlib
import ctypes
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from postgrad.core.process import kill_group

_PR_SET_CHILD_SUBREAPER = 36
_PR_GET_CHILD_SUBREAPER = 37
_SECONDS = 1.0  # longest wait for killed processes to be gone


def cpu_of_this_process() -> float:
    """CPU seconds of this process, of the children it has waited for, and of living descendants."""
    waited = resource.getrusage(resource.RUSAGE_CHILDREN)
    used = time.process_time() + waited.ru_utime + waited.ru_stime
    if not hasattr(os, "waitid"):  # macOS before Python 3.13: living children are not counted
        return used
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:  # the usual case: no child, so nothing to look up
        return used
    return used + cpu_under(os.getpid())


def cpu_of(pid: int) -> float:
    """CPU seconds of another process as above, to the clock tick (10 ms); 0 where it is gone."""
    return _with_waited(pid) + cpu_under(pid)


def descendants(pid: int) -> Iterator[int]:
    """Ids of the processes under a process, parents first; one that ends meanwhile may lack."""
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text("ascii")
    except OSError:  # no Linux, an old kernel, or it is gone
        import psutil  # 30 ms to import, and few verifiers have children

        try:
            yield from (child.pid for child in psutil.Process(pid).children(recursive=True))
        except psutil.NoSuchProcess:
            return
        return
    for child in children.split():
        yield int(child)
        yield from descendants(int(child))


def cpu_under(pid: int) -> float:
    """CPU seconds of the living descendants, and of the children that these have waited for: a
    sandbox waits for its programs, the worker does not.
    """
    return sum(_with_waited(child) for child in descendants(pid))


def _with_waited(pid: int) -> float:
    import psutil

    try:
        times = psutil.Process(pid).cpu_times()
    except psutil.NoSuchProcess:
        return 0.0
    waited = getattr(times, "children_user", 0.0) + getattr(times, "children_system", 0.0)
    return times.user + times.system + waited


def end_with_descendants(process: subprocess.Popen[bytes], group: bool = False) -> int:
    """Kill a child, or its whole group, and wait for it and for what the kernel kills with it.

    Returns its exit status, or minus the signal that ended it.
    """
    under = list(descendants(process.pid))
    with adopting():
        if process.returncode is None:  # not reaped: the number is still its own
            kill_group(process.pid) if group else process.kill()
        code = process.wait()
        if sys.platform != "linux":  # there no kernel kills what has a session of its own
            for pid in under:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
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


class _Adopters:
    """How many are inside of `adopting`, and what was set before the first of them."""

    lock, inside, before = threading.Lock(), 0, 0


@contextlib.contextmanager
def adopting() -> Iterator[None]:
    """Inside, orphans among the descendants become children of this process (Linux only). Threads
    may be inside together: the process adopts until the last of them leaves.
    """
    if sys.platform != "linux":
        yield
        return
    prctl = ctypes.CDLL(None).prctl
    with _Adopters.lock:
        if not _Adopters.inside:  # a program that adopts already, for reasons of its own, goes on
            before = ctypes.c_int()
            prctl(_PR_GET_CHILD_SUBREAPER, ctypes.byref(before), 0, 0, 0)
            prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
            _Adopters.before = before.value
        _Adopters.inside += 1
    try:
        yield
    finally:
        with _Adopters.lock:
            _Adopters.inside -= 1
            if not _Adopters.inside:
                prctl(_PR_SET_CHILD_SUBREAPER, _Adopters.before, 0, 0, 0)
