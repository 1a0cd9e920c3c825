"""Handles: the results of role calls, the same for roles in this process and on a cluster.

A role in this process returns a finished handle; a remote one returns a handle that is finished
later. The loop calls `.result()` where it needs the value.
"""

from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")

Handle = Future


def done(value: T) -> Handle[T]:
    """A finished handle with this value."""
    handle: Handle[T] = Handle()
    handle.set_result(value)
    return handle
