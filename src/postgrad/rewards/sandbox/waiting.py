"""Waiting for descriptors. Standard library only."""

import select
from collections.abc import Iterable


def readable(descriptors: Iterable[int], seconds: float) -> list[int]:
    """Those that can be read, or whose other end is closed; waits for the first of them for at most
    `seconds`.

    select.select takes no descriptor above 1023, and a training process may have more files open.
    """
    poll = select.poll()
    for descriptor in descriptors:
        poll.register(descriptor, select.POLLIN)
    return [descriptor for descriptor, _ in poll.poll(1000.0 * seconds)]
