"""Detects processes that hang: for how long they have used no CPU time."""

import time
from collections.abc import Iterable
from contextlib import suppress

import psutil

STILL_SECONDS = 60.0  # after which processes that start are taken to hang
LOOK_SECONDS = 5.0  # between two measurements
# Statuses of a process that may hang. One that waits for a disk or a CPU, or is traced, does not.
_WAITS = (psutil.STATUS_SLEEPING, psutil.STATUS_STOPPED, psutil.STATUS_ZOMBIE)


class Stillness:
    """Measures how long processes, and all that they started, have stood still.

    They stand still while none uses CPU time and none is ready to. A process that polls, waits with
    a timeout, computes, however slowly, or reads from a slow disk does not.
    """

    def __init__(self) -> None:
        self._moved = self._looked = time.monotonic()
        self._spent: dict[int, float] = {}

    def seconds(self, pids: Iterable[int]) -> float:
        """For how many seconds these processes have stood still."""
        now = time.monotonic()
        if now - self._looked >= LOOK_SECONDS:
            self._looked = now
            spent = _spent(pids)
            if spent is None or spent != self._spent:
                self._moved, self._spent = now, spent or {}
        return self._looked - self._moved


def _spent(pids: Iterable[int]) -> dict[int, float] | None:
    """CPU seconds by process id; None where a process is at work now."""
    spent: dict[int, float] = {}
    for pid in pids:
        with suppress(psutil.NoSuchProcess):  # it has ended; its closed pipe reports that
            leader = psutil.Process(pid)
            for process in (leader, *leader.children(recursive=True)):
                with suppress(psutil.NoSuchProcess):
                    if process.status() not in _WAITS:
                        return None
                    spent[process.pid] = sum(process.cpu_times()[:2])
    return spent
