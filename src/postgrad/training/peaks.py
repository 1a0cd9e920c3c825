"""Peak memory of phases: resident bytes on a CPU, bytes of torch's allocator on a GPU.

The kernel keeps the peak of a process and resets it on request (clear_refs of proc(5)), so nothing
between two readings is missed. Where it cannot be reset, no peak is reported: that of the whole
process belongs to no single phase.
"""

from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import ClassVar, Protocol

import torch

STATUS, FORGET = Path("/proc/self/status"), Path("/proc/self/clear_refs")


class Gauge(Protocol):
    """Measures the memory of a process, in bytes."""

    def held(self) -> int:
        """Bytes that are held now."""
        ...

    def peak(self) -> int:
        """The most bytes held since `restart`."""
        ...

    def restart(self) -> None:
        """Resets the peak to what is held now."""
        ...


class Resident:
    """Resident bytes of this process, a Gauge."""

    most: ClassVar[int] = 0  # peak since the process began, however often the kernel's was reset

    def held(self) -> int:
        return _status("VmRSS")

    def peak(self) -> int:
        peak = _status("VmHWM")
        Resident.most = max(Resident.most, peak)
        return peak

    def restart(self) -> None:
        self.peak()
        FORGET.write_text("5")


class Allocated:
    """Bytes that torch has allocated for tensors on the GPU, without the driver's own: a Gauge."""

    def held(self) -> int:
        return torch.cuda.memory_allocated()

    def peak(self) -> int:
        return torch.cuda.max_memory_allocated()

    def restart(self) -> None:
        torch.cuda.reset_peak_memory_stats()


def gauge_for(device: str) -> Gauge | None:
    """The gauge for a run on `device`; None where the system cannot measure peaks exactly."""
    if device == "cuda":
        return Allocated()
    gauge = Resident()
    try:
        gauge.restart()
    except (OSError, LookupError):  # another system, or a container that hides it
        return None
    return gauge


class Peaks:
    """Peak memory of nested spans, such as phases and their parts."""

    def __init__(self, gauge: Gauge | None = None) -> None:
        self.step: dict[str, int] = {}  # by span: bytes above the baseline, in the current step
        self.total: dict[str, int] = {}  # the same over the whole process
        self._gauge = gauge
        self.baseline: int | None = None  # bytes that were held before the run
        self._open: list[int] = []  # the peak of each open span so far

    def set_baseline(self) -> None:
        """Takes what is held now as the baseline; only the first call does."""
        if self._gauge is not None and self.baseline is None:
            self._gather()
            self.baseline = self._gauge.held()
            self._open = [0] * len(self._open)  # what lay before the baseline is not the run's

    @contextmanager
    def within(self, name: str) -> Generator[None]:
        """Records the peak of what runs inside as the span `name`; an error records nothing."""
        if self._gauge is None:
            yield
            return
        self._gather()
        self._open.append(0)
        try:
            yield
        except BaseException:
            self._open.pop()
            raise
        self._gather()
        peak = self._open.pop()
        if self.baseline is not None:
            above = max(0, peak - self.baseline)
            self.step[name] = max(self.step.get(name, 0), above)
            self.total[name] = max(self.total.get(name, 0), above)

    def restarted(self) -> Gauge | None:
        """The gauge with its peak reset; the peak so far is counted for the open spans."""
        if self._gauge is not None:
            self._gather()
        return self._gauge

    def take_step(self) -> dict[str, int]:
        """NAME_memory_bytes by span of the step that ends now; the next step starts empty."""
        metrics = {f"{name}_memory_bytes": count for name, count in self.step.items()}
        self.step = {}
        return metrics

    def _gather(self) -> None:
        """Counts the peak so far for all open spans, then resets it."""
        assert self._gauge is not None
        peak = self._gauge.peak()
        self._open = [max(open_peak, peak) for open_peak in self._open]
        self._gauge.restart()


def _status(name: str) -> int:
    """Bytes of one line of /proc/self/status. Raises OSError, or KeyError where it has none."""
    for line in STATUS.read_text("ascii").splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise KeyError(name)
