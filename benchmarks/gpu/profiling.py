"""The largest kernels of a piece of work, and the share of it in which the device had none."""

import time
from collections import Counter
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from typing import Any

from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from benchmarks.gpu.session import Result, Session

MOST = 10  # kernels that are named
WIDEST = 160  # characters of a name
Span = tuple[float, float]  # start and end in microseconds


class Profile:
    """Records between `start` and `stop`; `result` has what was found then."""

    def __init__(self, session: Session) -> None:
        self.result: Result = {}
        self._session = session
        self._began = 0.0
        cuda = session.device == "cuda"
        self._type = DeviceType.CUDA if cuda else DeviceType.CPU
        self._profile = profile(
            activities=[ProfilerActivity.CUDA if cuda else ProfilerActivity.CPU]
        )

    def start(self) -> None:
        """Begins to record."""
        self._session.synchronize()
        self._profile.start()
        self._began = time.perf_counter()

    def stop(self) -> None:
        """Ends the recording and sums it up."""
        self._session.synchronize()
        seconds = time.perf_counter() - self._began
        self._profile.stop()
        events: list[Any] = [
            event
            for event in self._profile.events() or ()
            if event.device_type == self._type and not getattr(event, "is_user_annotation", False)
        ]
        self.result = summed(events, seconds, kernels=self._type == DeviceType.CUDA)


@contextmanager
def profiled(session: Session) -> Generator[Profile]:
    """Records the block."""
    recorded = Profile(session)
    recorded.start()
    yield recorded
    recorded.stop()


def summed(events: Iterable[Any], seconds: float, *, kernels: bool) -> Result:
    """The kernels by their seconds; `idle_share` is None where no kernel was seen. On a CPU
    operations stand for kernels, each with its own time.
    """
    spent: Counter[str] = Counter()
    calls: Counter[str] = Counter()
    spans: list[Span] = []
    for event in events:
        span = event.time_range
        spans.append((span.start, span.end))
        calls[event.name] += 1
        spent[event.name] += (span.end - span.start) if kernels else event.self_cpu_time_total
    return {
        "seconds": seconds,
        "calls": sum(calls.values()),
        "idle_share": max(0.0, 1.0 - busy(spans) / (1e6 * seconds)) if spans else None,
        "largest": [
            {
                "name": name[:WIDEST], "calls": calls[name], "seconds": took / 1e6,
                "share": took / (1e6 * seconds),
            }
            for name, took in spent.most_common(MOST)
        ],
    }  # fmt: skip


def busy(spans: list[Span]) -> float:
    """Microseconds that at least one of the spans covers."""
    total, until = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, until))
        until = max(until, end)
    return total
