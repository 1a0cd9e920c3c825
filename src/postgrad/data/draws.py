"""Draws: a job asks a dataset or a mixture for the record of a ticket. `Order` permutes the rows
anew in every epoch.
"""

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, Generic, Protocol, TypeVar, overload

import numpy as np
from numpy.typing import NDArray

from postgrad.core.seeds import permutation
from postgrad.data.account import RowAccount


class Order:
    """Draws each of `rows` rows once an epoch. Keeps no state but the newest permutation."""

    def __init__(self, rows: int, shuffle: bool) -> None:
        self._rows = rows
        self._shuffle = shuffle
        self._permuted: tuple[int, int] | None = None
        self._places: NDArray[np.int64] = np.arange(rows)

    def place(self, ticket: int, seed: int) -> int:
        """The position in [0, rows) that `ticket` draws under `seed`."""
        epoch, number = divmod(ticket, self._rows)
        if self._shuffle and self._permuted != (seed, epoch):
            self._places = permutation(self._rows, seed, "data", epoch)
            self._permuted = (seed, epoch)
        return int(self._places[number])


class Ticketed(Protocol):
    """A record that a ticket draws: a frozen dataclass."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    @property
    def ticket(self) -> int:
        """The global number of the draw."""
        ...


Drawn = TypeVar("Drawn", bound=Ticketed)


class Draws(Protocol[Drawn]):
    """One dataset or a mixture, as a job sees it."""

    @property
    def accounts(self) -> Sequence[RowAccount]:
        """The account of each dataset's rows, in order."""
        ...

    @property
    def parts(self) -> "Sequence[DrawnSet[Drawn]]":
        """The datasets that it is made of, in order."""
        ...

    def __len__(self) -> int:
        """How many draws one epoch has."""
        ...

    def draw(self, ticket: int, seed: int) -> Drawn:
        """The record of a ticket. seed: of the run; it decides the order of every epoch."""
        ...

    def all(self) -> Sequence[Drawn]:
        """Every record once, with its position as its ticket."""
        ...


class Records(Sequence[Drawn], ABC):
    """Records that are made when they are asked for: their arrays and texts lie together."""

    @abstractmethod
    def record(self, place: int) -> Drawn:
        """The record at `place`, from 0 on, with `place` as its ticket."""

    @overload
    def __getitem__(self, place: int) -> Drawn: ...
    @overload
    def __getitem__(self, place: slice) -> list[Drawn]: ...
    def __getitem__(self, place: int | slice) -> Drawn | list[Drawn]:
        places = range(len(self))[place]
        return self.record(places) if isinstance(places, int) else [*map(self.record, places)]


class DrawnSet(Generic[Drawn]):
    """The kept records of one dataset, by ticket. account: what became of every row."""

    def __init__(self, entries: Sequence[Drawn], account: RowAccount, shuffle: bool) -> None:
        """entries: in the order of the rows, each with its position as its ticket."""
        self.account = account
        self.accounts = (account,)
        self._entries = entries
        self._order = Order(len(entries), shuffle)

    @property
    def parts(self) -> "Sequence[DrawnSet[Drawn]]":
        """This dataset alone: it is no mixture."""
        return (self,)

    def __len__(self) -> int:
        return len(self._entries)

    def draw(self, ticket: int, seed: int) -> Drawn:
        """The record of a ticket, from its position in the permutation of its epoch."""
        return dataclasses.replace(self._entries[self._order.place(ticket, seed)], ticket=ticket)

    def all(self) -> Sequence[Drawn]:
        """Every record once in the order of the rows, with its position as its ticket: made when it
        is asked for.
        """
        return self._entries
