"""What a job draws from: records by ticket."""

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar, Generic, Protocol, TypeVar

from postgrad.data.account import RowAccount
from postgrad.data.order import Order


class Ticketed(Protocol):
    """A record that a ticket draws: a frozen dataclass."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    @property
    def ticket(self) -> int:
        """The global number of the draw."""
        ...


Drawn = TypeVar("Drawn", bound=Ticketed)


class Draws(Protocol[Drawn]):
    """What a job draws from: one dataset or a mixture."""

    @property
    def accounts(self) -> Sequence[RowAccount]:
        """Where the rows of each dataset went."""
        ...

    @property
    def parts(self) -> "Sequence[DrawnSet[Drawn]]":
        """The datasets, one by one."""
        ...

    def __len__(self) -> int:
        """Draws in one epoch."""
        ...

    def draw(self, ticket: int, seed: int) -> Drawn:
        """What a ticket stands for."""
        ...

    def all(self) -> list[Drawn]:
        """Every row once; its ticket is its place."""
        ...


class DrawnSet(Generic[Drawn]):
    """The records of a dataset that fit. account: where every row went."""

    def __init__(self, entries: Sequence[Drawn], account: RowAccount, shuffle: bool) -> None:
        """entries: in the order of the rows, each with its place as its ticket."""
        self.account = account
        self.accounts = (account,)
        self._entries = entries
        self._order = Order(len(entries), shuffle)

    @property
    def parts(self) -> "Sequence[DrawnSet[Drawn]]":
        """Itself."""
        return (self,)

    def __len__(self) -> int:
        return len(self._entries)

    def draw(self, ticket: int, seed: int) -> Drawn:
        """The record of a ticket: its place in the permutation of its epoch."""
        return dataclasses.replace(self._entries[self._order.place(ticket, seed)], ticket=ticket)

    def all(self) -> list[Drawn]:
        """Every record once in the order of the rows; its ticket is its place."""
        return list(self._entries)
