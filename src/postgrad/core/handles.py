"""Handles: what a role call returns, so that the loop cannot tell a local role from a remote one.

A role in this process answers with a finished handle; one behind a cluster answers with a handle
that is finished later. Either way the loop says `.result()` where it needs the value.
"""

from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")

Handle = Future


def done(value: T) -> Handle[T]:
    """A handle whose value is there already."""
    handle: Handle[T] = Handle()
    handle.set_result(value)
    return handle
