"""Stopping on SIGTERM, SIGINT and SIGHUP (a terminal that is closed) without losing work.

A boundary is the end of a step. Until a step's first update the weights are those of the last
boundary: the run stops at once and saves it. From then on the run finishes the step if that is
expected within the grace time; else it stops at once, and the last checkpoint stands. A second
signal stops at once, unless it is SIGHUP again.
"""

import signal
import threading
import time
from types import FrameType

from postgrad.core.errors import RunError

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class Stop(BaseException):
    """Raised in the main thread where the run can stop at once. No Exception, so that no library
    swallows it.
    """


class Stopped(RunError):
    """A signal stopped the run; the message says where it stands."""


class StopSignals:
    """Handles the signals within a `with` block. Outside the main thread it leaves them alone."""

    def __init__(self, grace_seconds: float) -> None:
        self.asked = False
        self._grace = grace_seconds
        self._held: float | None = None  # since when weights have been moving
        self._lasted: float | None = None  # how long that took the last time
        self._before: dict[int, object] = {}

    def __enter__(self) -> "StopSignals":
        if threading.current_thread() is threading.main_thread():
            under_nohup = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
            heard = [number for number in SIGNALS if number != signal.SIGHUP or not under_nohup]
            self._before = {number: signal.signal(number, self._on_signal) for number in heard}
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # pyright: ignore[reportArgumentType]

    @property
    def held(self) -> bool:
        """True where weights have moved since the last boundary."""
        return self._held is not None

    def hold(self) -> None:
        """To be called before the first update of a step moves the weights."""
        if self._held is None:
            self._held = time.monotonic()

    def release(self) -> None:
        """To be called at a boundary: the step has ended, with evaluation and checkpoint."""
        if self._held is not None:
            self._lasted = time.monotonic() - self._held
        self._held = None

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.asked:
            if number == signal.SIGHUP:  # kernel and shell both say that a terminal was closed
                return
            raise KeyboardInterrupt
        self.asked = True
        if self._held is None or self._left() > self._grace:
            raise Stop

    def _left(self) -> float:
        """Seconds until the next boundary, as the last step took; infinity before the first."""
        if self._held is None or self._lasted is None:
            return float("inf")
        return max(0.0, self._lasted - (time.monotonic() - self._held))
