"""The C library's heap, which keeps what was freed in it."""

import ctypes
import sys
from functools import cache
from typing import Any

# Bytes that are free. Fresh pages cost 0.2 ms a MB in a virtual machine: for less of them that
# would be a tenth of a step of a small model.
TRIM_BYTES = 2**28


class _HeapInfo(ctypes.Structure):
    """struct mallinfo2 of mallinfo(3)."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks",
            "fordblks", "keepcost",
        )
    ]  # fmt: skip


@cache
def _library() -> Any:
    """glibc, of a version that can be asked (2.33); None elsewhere."""
    if sys.platform != "linux":
        return None
    libc = ctypes.CDLL(None)
    if not (hasattr(libc, "malloc_trim") and hasattr(libc, "mallinfo2")):
        return None
    libc.mallinfo2.restype = _HeapInfo
    libc.malloc_trim.argtypes = [ctypes.c_size_t]
    return libc


def free_heap_bytes() -> int:
    """Bytes that were freed and may be held still; 0 where the C library cannot be asked."""
    library = _library()
    return 0 if library is None else library.mallinfo2().fordblks


def trim_heap() -> None:
    """Gives pages that were freed to the system, where there are many.

    An update leaves holes between what it keeps. What needs large pieces of memory next finds no
    room there, and both would lie beside each other.
    """
    if free_heap_bytes() > TRIM_BYTES:
        _library().malloc_trim(0)
