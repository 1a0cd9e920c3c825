"""Returns free memory of the C library's heap to the system."""

import ctypes
import sys
from functools import cache
from typing import Any

# Free bytes above which the heap is trimmed. New pages cost 0.2 ms a MB in a virtual machine, which
# for small models would be a tenth of a step.
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
    """glibc, from version 2.33 on, which has mallinfo2; None elsewhere."""
    if sys.platform != "linux":
        return None
    libc = ctypes.CDLL(None)
    if not (hasattr(libc, "malloc_trim") and hasattr(libc, "mallinfo2")):
        return None
    libc.mallinfo2.restype = _HeapInfo
    libc.malloc_trim.argtypes = [ctypes.c_size_t]
    return libc


def free_heap_bytes() -> int:
    """Freed bytes that the heap may still hold; 0 without glibc."""
    library = _library()
    return 0 if library is None else library.mallinfo2().fordblks


def trim_heap() -> None:
    """Returns freed pages to the system where there are many (TRIM_BYTES).

    An update leaves free holes between the memory that it keeps. The next phase needs larger pieces
    than these holes, so without trimming both would add up.
    """
    if free_heap_bytes() > TRIM_BYTES:
        _library().malloc_trim(0)
