"""Peak memory of phases: resident bytes on a CPU; on a GPU the bytes of torch's allocator, those of
tensors and those that it has reserved for them, which decide whether a run fits. And what torch
says of them where a GPU refuses more.

The kernel keeps the peak of a process and resets it on request (clear_refs of proc(5)), so nothing
between two readings is missed. Where it cannot be reset, no peak is reported: that of the whole
process belongs to no single phase.
"""

import os
import re
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Protocol

import torch

from postgrad.parallel.device import ALLOCATOR, EXPANDABLE

STATUS, FORGET = Path("/proc/self/status"), Path("/proc/self/clear_refs")


class Gauge(Protocol):
    """Measures the memory of a process, in bytes."""

    column: ClassVar[str]  # what its metrics end with: "memory_bytes"

    def held(self) -> int:
        """Bytes that are held now."""
        ...

    def peak(self) -> int:
        """The most bytes held since `restart`."""
        ...

    def restart(self) -> None:
        """Resets the peak to what is held now; other gauges of the device may be reset too."""
        ...


class Resident:
    """Resident bytes of this process, a Gauge."""

    column: ClassVar[str] = "memory_bytes"
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

    column: ClassVar[str] = "memory_bytes"

    def held(self) -> int:
        return torch.cuda.memory_allocated()

    def peak(self) -> int:
        return torch.cuda.max_memory_allocated()

    def restart(self) -> None:
        torch.cuda.reset_peak_memory_stats()


class Reserved:
    """Bytes that torch's allocator has taken from the GPU, for tensors and in holes between them: a
    Gauge.
    """

    column: ClassVar[str] = "reserved_bytes"

    def held(self) -> int:
        return torch.cuda.memory_reserved()

    def peak(self) -> int:
        return torch.cuda.max_memory_reserved()

    def restart(self) -> None:
        torch.cuda.reset_peak_memory_stats()


def gauges_for(device: str) -> tuple[Gauge, ...]:
    """The gauges for a run on `device`; none where the system cannot measure peaks exactly."""
    if device == "cuda":
        return Allocated(), Reserved()
    gauge = Resident()
    try:
        gauge.restart()
    except (OSError, LookupError):  # another system, or a container that hides it
        return ()
    return (gauge,)


class Peaks:
    """Peak memory of nested spans, such as phases and their parts."""

    def __init__(self, *gauges: Gauge) -> None:
        # By column ("sample_memory_bytes"): bytes above the baseline, in the current step.
        self.step: dict[str, int] = {}
        self.total: dict[str, int] = {}  # the same over the whole process
        self._gauges = gauges
        self._held: list[int] | None = None  # before the run, by gauge
        self._open: list[list[int]] = []  # the peaks of each open span so far, by gauge

    @property
    def baseline(self) -> int | None:
        """Bytes that were held before the run; None: not known."""
        return self._held[0] if self._held else None

    def set_baseline(self) -> None:
        """Takes what is held now as the baseline; only the first call does."""
        if self._gauges and self._held is None:
            self._gather()
            self._held = [gauge.held() for gauge in self._gauges]
            # what lay before the baseline is not the run's
            self._open = [[0] * len(self._gauges) for _ in self._open]

    @contextmanager
    def within(self, name: str) -> Generator[None]:
        """Records the peaks of what runs inside as the span `name`; an error records nothing."""
        if not self._gauges:
            yield
            return
        self._gather()
        self._open.append([0] * len(self._gauges))
        try:
            yield
        except BaseException:
            self._open.pop()
            raise
        self._gather()
        peaks = self._open.pop()
        if self._held is None:
            return
        for gauge, peak, held in zip(self._gauges, peaks, self._held, strict=True):
            column, above = f"{name}_{gauge.column}", max(0, peak - held)
            self.step[column] = max(self.step.get(column, 0), above)
            self.total[column] = max(self.total.get(column, 0), above)

    def restarted(self) -> Gauge | None:
        """The first gauge with its peak reset; the peak so far is counted for the open spans."""
        if not self._gauges:
            return None
        self._gather()
        return self._gauges[0]

    def take_step(self) -> dict[str, int]:
        """The columns by span of the step that ends now; the next step starts empty."""
        metrics, self.step = self.step, {}
        return metrics

    def _gather(self) -> None:
        """Counts the peaks so far for all open spans, then resets them."""
        peaks = [gauge.peak() for gauge in self._gauges]  # all, before any is reset
        self._open = [
            [max(pair) for pair in zip(so_far, peaks, strict=True)] for so_far in self._open
        ]
        for gauge in self._gauges:
            gauge.restart()


# What an out-of-memory error of torch says of a GPU, in torch 2.11 and 2.13.
_SIZE = r"([\d.]+) (bytes|KiB|MiB|GiB)"
_SAID = {
    "asked": f"Tried to allocate {_SIZE}",
    "free": f"of which {_SIZE} is free",
    "allocated": f"{_SIZE} is allocated by PyTorch",
    "fragmented": f"{_SIZE} is reserved by PyTorch but unallocated",
}
_UNITS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


@dataclass(frozen=True, slots=True)
class DeviceFull:
    """The memory of a GPU at the moment when it had none for a tensor: bytes.

    It is read from the error, because that also comes from other ranks, and because much is freed
    while the error passes through a backward pass.
    """

    asked: int  # of the tensor
    free: int  # on the device
    allocated: int  # of tensors
    fragmented: int  # reserved for tensors, in holes between them

    @classmethod
    def of(cls, error: BaseException | None) -> "DeviceFull | None":
        """What the error, or one that it was raised from, says; None where none says all of it."""
        while error is not None:
            matches = {name: re.search(pattern, str(error)) for name, pattern in _SAID.items()}
            sizes = {
                name: int(float(match[1]) * _UNITS[match[2]])
                for name, match in matches.items()
                if match is not None
            }
            if len(sizes) == len(_SAID):
                return cls(**sizes)
            error = error.__cause__
        return None

    def text(self) -> str:
        """For people: reserved, allocated and fragmented bytes, and a setting that helps where the
        holes would have had room.
        """
        text = (
            f"torch had reserved {_gigabytes(self.allocated + self.fragmented)}: "
            f"{_gigabytes(self.allocated)} allocated to tensors and {_gigabytes(self.fragmented)} "
            f"fragmented, in holes between them; {_gigabytes(self.free)} of the GPU were free and "
            f"{_gigabytes(self.asked)} asked for"
        )
        if self.fragmented + self.free < self.asked:
            return text
        settings = next((os.environ[name] for name in ALLOCATOR if name in os.environ), "")
        grows = f"{EXPANDABLE}:True"
        if grows not in settings:
            wanted = ",".join(filter(None, (settings, grows)))
            return f"{text}; holes would have had room for it: set {ALLOCATOR[0]}={wanted}"
        return f"{text}; holes would have had room for it, were they together"


def _gigabytes(count: int) -> str:
    return f"{count / 1e9:.2f} GB"


def _status(name: str) -> int:
    """Bytes of one line of /proc/self/status. Raises OSError, or KeyError where it has none."""
    for line in STATUS.read_text("ascii").splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise KeyError(name)
