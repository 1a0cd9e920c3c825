"""SIGTERM, SIGINT and a terminal that is closed: stop where nothing is lost, and say where that is.

Until a step's first update the weights are those of the last boundary: the run stops at once and
that boundary is saved. From then on it goes to the end of the step if that is foreseen within the
grace time, else it stops at once and the last checkpoint stands. A second signal stops at once,
unless it is one more of a closed terminal.
"""

import signal
import threading
import time
from types import FrameType

from postgrad.core.errors import RunError

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class Stop(BaseException):
    """Raised in the main thread where the run can stop at once; no library may swallow it."""


class Stopped(RunError):
    """The run was asked to stop, and where it stands."""


class StopSignals:
    """Use `with`. Outside the main thread signals are left alone."""

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
        """The first update of a step is about to move the weights."""
        if self._held is None:
            self._held = time.monotonic()

    def release(self) -> None:
        """The step has ended, evaluation and checkpoint included: a boundary."""
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
        """Seconds until the next boundary, as foreseen from the step before."""
        if self._held is None or self._lasted is None:
            return float("inf")
        return max(0.0, self._lasted - (time.monotonic() - self._held))
