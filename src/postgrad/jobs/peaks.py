"""The most memory that was held within a phase: resident on a CPU, of torch's allocator on a GPU.

The kernel keeps the peak of a process and begins it anew when asked (clear_refs of proc(5)), so
nothing between two looks is missed. Where it cannot be asked, nothing is said: the peak of the
whole process is no phase's.
"""

from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import ClassVar, Protocol

import torch

STATUS, FORGET = Path("/proc/self/status"), Path("/proc/self/clear_refs")


class Gauge(Protocol):
    """What a process holds, in bytes."""

    def held(self) -> int:
        """Now."""
        ...

    def peak(self) -> int:
        """The most since `restart`."""
        ...

    def restart(self) -> None:
        """The peak begins anew from what is held now."""
        ...


class Resident:
    """Resident bytes of this process. most: since the process began, however often the kernel's own
    peak, which is then the newest phase's only, began anew.
    """

    most: ClassVar[int] = 0

    def held(self) -> int:
        """Gauge.held."""
        return _status("VmRSS")

    def peak(self) -> int:
        """Gauge.peak."""
        peak = _status("VmHWM")
        Resident.most = max(Resident.most, peak)
        return peak

    def restart(self) -> None:
        """Gauge.restart."""
        self.peak()
        FORGET.write_text("5")


class Allocated:
    """Bytes that torch has given to tensors on the GPU; the driver's own are not among them."""

    def held(self) -> int:
        """Gauge.held."""
        return torch.cuda.memory_allocated()

    def peak(self) -> int:
        """Gauge.peak."""
        return torch.cuda.max_memory_allocated()

    def restart(self) -> None:
        """Gauge.restart."""
        torch.cuda.reset_peak_memory_stats()


def gauge_for(device: str) -> Gauge | None:
    """What measures a run on `device`; None where the system has nothing exact."""
    if device == "cuda":
        return Allocated()
    gauge = Resident()
    try:
        gauge.restart()
    except (OSError, LookupError):  # another system, or a container that hides it
        return None
    return gauge


class Peaks:
    """Peaks of spans, each within the one that is open when it begins. step: bytes above the
    baseline by span, of the step under way; total: of the whole process.
    """

    def __init__(self, gauge: Gauge | None = None) -> None:
        self.step: dict[str, int] = {}
        self.total: dict[str, int] = {}
        self._gauge = gauge
        self.baseline: int | None = None  # bytes that the run found
        self._open: list[int] = []  # the peak of each open span so far

    def set_baseline(self) -> None:
        """What is held now was held before the run's own: counted from the first call on."""
        if self._gauge is not None and self.baseline is None:
            self._gather()
            self.baseline = self._gauge.held()
            self._open = [0] * len(self._open)  # what lay before the baseline is not the run's

    @contextmanager
    def within(self, name: str) -> Generator[None]:
        """The peak of what happens inside is that of the span `name`, unless it is raised."""
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
        """The gauge, begun anew: what was held before belongs to the open spans."""
        if self._gauge is not None:
            self._gather()
        return self._gauge

    def take_step(self) -> dict[str, int]:
        """NAME_memory_bytes of the step that ends here."""
        metrics = {f"{name}_memory_bytes": count for name, count in self.step.items()}
        self.step = {}
        return metrics

    def _gather(self) -> None:
        """What was held so far belongs to all open spans; what follows may belong to others."""
        assert self._gauge is not None
        peak = self._gauge.peak()
        self._open = [max(open_peak, peak) for open_peak in self._open]
        self._gauge.restart()


def _status(name: str) -> int:
    """Bytes of a line of proc(5)'s status. Raises OSError, or KeyError where there is none."""
    for line in STATUS.read_text("ascii").splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise KeyError(name)
