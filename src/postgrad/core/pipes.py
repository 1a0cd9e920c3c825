"""The pipes of a child process that runs foreign code. Imports little.

The protocol's pipes are moved away from descriptors 0 and 1, so that code that prints or reads
input cannot disturb the protocol: what it prints goes to standard error.
"""

import os
import sys
from io import TextIOWrapper
from typing import BinaryIO, cast

_SIGKILL = 9


def take_pipes() -> tuple[BinaryIO, BinaryIO]:
    """(requests, answers): the original standard input and output, for the protocol alone."""
    requests, answers = os.dup(0), os.dup(1)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.dup2(2, 1)
    os.close(null)
    printed: object = sys.stdout
    if isinstance(printed, TextIOWrapper):  # the last words before a crash arrive
        cast(TextIOWrapper, printed).reconfigure(line_buffering=True)
    return os.fdopen(requests, "rb"), os.fdopen(answers, "wb", buffering=0)


def write(pipe: BinaryIO, line: bytes) -> None:
    """Writes all of `line`; one write to a raw pipe may take only a part."""
    rest = memoryview(line)
    while rest:
        rest = rest[pipe.write(rest) :]


def die_with_parent() -> None:
    """On Linux the kernel kills this process with its parent; elsewhere the closed pipe ends it."""
    if sys.platform != "linux":
        return
    import ctypes

    pr_set_pdeathsig = 1
    ctypes.CDLL(None, use_errno=True).prctl(pr_set_pdeathsig, _SIGKILL)
