"""What a Python on the stub of a CUDA device asks of it: counts, and where they come from. For
scripts that helpers.gpu_stub starts; see tests/gpu/stub/README.md.
"""

import ctypes
import sys
import threading
import traceback
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from enum import IntFlag
from pathlib import Path
from typing import Any

STUB = ctypes.CDLL(None)
COUNTS = (  # struct stub_counts of native/stub.h
    "launches",
    "to_device",
    "from_device",
    "on_device",
    "pageable",
    "waits",
    "allocations",
    "bytes_to_device",
    "bytes_from_device",
    "held",
    "peak",
    "handles",
    "late_handles",
    "pageable_from_device",
    "captured",
    "captures",
    "graph_launches",
    "replayed",
    "refused",
)


class Event(IntFlag):
    """enum event of native/stub.h."""

    WAIT = 1
    FROM_DEVICE = 2
    TO_DEVICE = 4
    PAGEABLE = 8
    LAUNCH = 16
    ALLOCATION = 32
    REFUSED = 64
    GRAPH_LAUNCH = 128
    CAPTURED = 256


def counts() -> dict[str, int]:
    """Since the last reset; `held` and `peak` are of bytes."""
    numbers = (ctypes.c_long * len(COUNTS))()
    STUB.stub_counts(numbers)
    return dict(zip(COUNTS, numbers, strict=True))


def reset() -> None:
    """Sets all counts to 0, and the peak of memory to what is held."""
    STUB.stub_reset()


def kernels() -> list[dict[str, Any]]:
    """Triton's kernels that were loaded, with what ptxas says: registers of a thread, bytes of its
    frame (`local`, where spilled registers lie), bytes of shared memory that a launch asked for.
    """
    kernels_by_name: list[dict[str, Any]] = []

    def each(name: bytes, *numbers: int) -> None:
        resources = ("registers", "local", "shared", "launches")
        kernels_by_name.append({"name": name.decode()} | dict(zip(resources, numbers, strict=True)))

    listed = ctypes.CFUNCTYPE(None, ctypes.c_char_p, *3 * (ctypes.c_int,), ctypes.c_long)(each)
    ctypes.CDLL("libcuda.so.1").stub_kernels(listed)
    return kernels_by_name


_HOOK = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_long, ctypes.c_char_p)
SOURCES = str(Path(__file__).parent.parent.parent / "src")


@contextmanager
def traced(events: Event, depth: int = 3, within: str = SOURCES) -> Iterator[Counter[str]]:
    """Counts where `events` come from: the event, the kernel or call, and the innermost `depth`
    lines of Python in files whose path has `within`. What autograd's own threads ask has the lines
    of the thread that called this.
    """
    event_counts: Counter[str] = Counter()
    here = threading.get_ident()

    def lines(thread: int) -> list[str]:
        stack = traceback.extract_stack(sys._current_frames().get(thread))
        within_it = [
            each for each in stack if within in each.filename and each.filename != __file__
        ]
        return [
            f"{Path(each.filename).name}:{each.lineno}" for each in within_it[: -depth - 1 : -1]
        ]

    def record_event(event: int, size: int, name: bytes | None) -> None:
        of_python = lines(threading.get_ident()) or lines(here)
        event_counts[f"{Event(event).name} {(name or b'').decode()}: {' < '.join(of_python)}"] += 1

    hook = _HOOK(record_event)
    STUB.stub_hook(hook, int(events))
    try:
        yield event_counts
    finally:
        STUB.stub_hook(None, 0)
