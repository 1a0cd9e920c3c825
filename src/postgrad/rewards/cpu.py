"""CPU time of a process and its descendants, in seconds."""

import os
import resource
import time


def own() -> float:
    """CPU seconds of this process, of the children it has waited for, and of those that live."""
    waited = resource.getrusage(resource.RUSAGE_CHILDREN)
    used = time.process_time() + waited.ru_utime + waited.ru_stime
    if not hasattr(os, "waitid"):  # macOS before Python 3.13: living children are not counted
        return used
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:  # the usual case: no child, so nothing to look up
        return used
    return used + _living_descendants(os.getpid())


def of(pid: int) -> float:
    """The same of another process, to the clock tick (10 ms); 0 where it is gone."""
    import psutil

    try:
        times = psutil.Process(pid).cpu_times()
    except psutil.NoSuchProcess:
        return 0.0
    waited = getattr(times, "children_user", 0.0) + getattr(times, "children_system", 0.0)
    return times.user + times.system + waited + _living_descendants(pid)


def _living_descendants(pid: int) -> float:
    import psutil  # 30 ms to import, and few verifiers have children

    used = 0.0
    try:
        for child in psutil.Process(pid).children(recursive=True):
            times = child.cpu_times()
            used += times.user + times.system
    except psutil.NoSuchProcess:
        return used
    return used
