"""Progress of long work deep inside calls, for whoever shows it. Nobody does by default."""

from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeVar

Item = TypeVar("Item")
Listener = Callable[[str, int, int | None], None]  # what is done, items done, items in all
EVERY = 256  # items between two reports

_listener: ContextVar[Listener | None] = ContextVar("progress", default=None)


@contextmanager
def reported_to(listener: Listener) -> Generator[None]:
    """While the block runs, `report` calls `listener`."""
    token = _listener.set(listener)
    try:
        yield
    finally:
        _listener.reset(token)


def report(work: str, done: int, total: int | None) -> None:
    """Says that `done` of `total` items are done. work: in words, "rows tokenised". total: None
    where nobody knows it.
    """
    listener = _listener.get()
    if listener is not None:
        listener(work, done, total)


def tracked(work: str, items: Iterable[Item], total: int | None = None) -> Iterator[Item]:
    """The items, with a report for every EVERY of them."""
    for number, item in enumerate(items):
        if number % EVERY == 0:
            report(work, number, total)
        yield item
