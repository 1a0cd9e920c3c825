"""Whether processes hang: for how long nothing of them has moved."""

import time
from collections.abc import Iterable
from contextlib import suppress

import psutil

STILL_SECONDS = 60.0  # after which processes that start are held to hang
LOOK_SECONDS = 5.0  # between two looks
# Who waits for a disk or for a processor, or is being debugged, does not hang.
_WAITS = (psutil.STATUS_SLEEPING, psutil.STATUS_STOPPED, psutil.STATUS_ZOMBIE)


class Stillness:
    """Looks at processes and at everything that they started.

    They stand still while none has used a processor at all and none could. So whoever waits with a
    timeout, looks again and again, computes, however slowly, or reads from a slow disk does not.
    """

    def __init__(self) -> None:
        self._moved = self._looked = time.monotonic()
        self._spent: dict[int, float] = {}

    def seconds(self, pids: Iterable[int]) -> float:
        """For how long these have stood still."""
        now = time.monotonic()
        if now - self._looked >= LOOK_SECONDS:
            self._looked = now
            spent = _spent(pids)
            if spent is None or spent != self._spent:
                self._moved, self._spent = now, spent or {}
        return self._looked - self._moved


def _spent(pids: Iterable[int]) -> dict[int, float] | None:
    """Seconds of processors by process; None where one is at work now."""
    spent: dict[int, float] = {}
    for pid in pids:
        with suppress(psutil.NoSuchProcess):  # it has ended, which its pipe says
            leader = psutil.Process(pid)
            for process in (leader, *leader.children(recursive=True)):
                with suppress(psutil.NoSuchProcess):
                    if process.status() not in _WAITS:
                        return None
                    spent[process.pid] = sum(process.cpu_times()[:2])
    return spent
