"""Which draws from the data are settled: trained, filtered, dropped by rule, or failed for good."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Cursor:
    """The settled tickets. All others are open, and are drawn again after a resume also where they
    were sampled: nothing is lost and nothing is trained twice.
    """

    frontier: int = 0  # all tickets below it are settled
    beyond: frozenset[int] = frozenset()  # settled tickets from `frontier` on: {5, 7}

    def settle(self, tickets: Iterable[int]) -> "Cursor":
        """The cursor after `tickets`; settling a ticket twice is a ValueError."""
        beyond = set(self.beyond)
        for ticket in tickets:
            if ticket < self.frontier or ticket in beyond:
                raise ValueError(f"ticket {ticket} is settled already")
            beyond.add(ticket)
        frontier = self.frontier
        while frontier in beyond:
            beyond.remove(frontier)
            frontier += 1
        return Cursor(frontier, frozenset(beyond))

    def open_tickets(self) -> Iterator[int]:
        """Every unsettled ticket from the lowest on, without end."""
        ticket = self.frontier
        while True:
            if ticket not in self.beyond:
                yield ticket
            ticket += 1

    @property
    def settled(self) -> int:
        """How many tickets are settled."""
        return self.frontier + len(self.beyond)

    def to_json(self) -> dict[str, object]:
        """JSON values for a checkpoint: {"frontier": 3, "beyond": [5, 7]}."""
        return {"frontier": self.frontier, "beyond": sorted(self.beyond)}

    @classmethod
    def from_json(cls, data: dict[str, object]) -> "Cursor":
        """The cursor of `to_json`; raises KeyError or TypeError where `data` is not one."""
        frontier, beyond = data["frontier"], data["beyond"]
        if not isinstance(frontier, int) or not isinstance(beyond, list):
            raise TypeError(f"not a cursor: {data!r}")
        return cls(frontier, frozenset(int(t) for t in beyond))  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
