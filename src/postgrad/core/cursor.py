"""Tickets: which draws from the data are settled (trained, filtered, dropped by rule, or failed for
good), and which may be under way.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Protocol


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


class Schedule:
    """Which tickets may start, and which are the next step's: training in ticket order, on samples
    that were begun at most `staleness` steps before, and nothing is ever dropped.

    A pure state machine without clock and without I/O. rollout/source.py drives engines with it,
    plan/simulate.py a simulation. Versions of the weights count steps: version v is what v steps
    made. Step k, from 0 on, trains on the first `groups` open tickets that teach. A ticket may
    start where the version is at least k - staleness for the step k that it will be part of at the
    latest. With staleness 0 a step's tickets start when the step before is published.
    """

    def __init__(
        self,
        groups: int,
        staleness: int,
        *,
        version: int = 0,
        begun: Mapping[int, int] | None = None,
    ) -> None:
        """groups: of a step. version: of the newest weights. begun: tickets that are under way at a
        resume, with the version at which each was begun.
        """
        if groups < 1 or staleness < 0:
            raise ValueError(f"{groups} groups a step, at most {staleness} steps old")
        self.groups, self.staleness = groups, staleness
        self.version = version  # of the newest published weights
        self.taken = version  # steps whose tickets have been taken
        self._begun = dict(sorted((begun or {}).items()))  # open tickets, in order
        self._ended: set[int] = set()  # of these

    @property
    def open(self) -> Mapping[int, int]:
        """Ticket -> the version at which it was begun, of all that are under way, in order."""
        return self._begun

    @property
    def room(self) -> int:
        """How many tickets may start now."""
        steps = self.version + 1 + self.staleness - self.taken
        return max(0, steps * self.groups - len(self._begun))

    @property
    def overdue(self) -> bool:
        """Whether an open ticket would be too old for its step, as where the bound was lowered."""
        return any(
            self.taken + place // self.groups - version > self.staleness
            for place, version in enumerate(self._begun.values())
        )

    @property
    def front(self) -> tuple[int, ...]:
        """The tickets that the next step trains on, as far as they have begun."""
        return tuple(islice(self._begun, self.groups))

    @property
    def ready(self) -> bool:
        """Whether the next step's tickets are all there and have all ended."""
        front = self.front
        return len(front) == self.groups and self._ended.issuperset(front)

    def start(self, ticket: int) -> None:
        """A ticket begins. Raises ValueError where it may not, or is not behind all open ones."""
        if not self.room or (self._begun and ticket <= next(reversed(self._begun))):
            raise ValueError(f"ticket {ticket} may not start: room for {self.room}, in order")
        self._begun[ticket] = self.version

    def end(self, ticket: int) -> None:
        """All samples of an open ticket are there, with their scores."""
        if ticket not in self._begun or ticket in self._ended:
            raise ValueError(f"ticket {ticket} is not under way")
        self._ended.add(ticket)

    def filter(self, ticket: int) -> None:
        """A ticket that has ended teaches nothing: it is settled, and another may start for it."""
        self._ended.remove(ticket)
        del self._begun[ticket]

    def take(self, *, short: bool = False) -> dict[int, int]:
        """Begins a step with its tickets. Returns the age of each: how many steps ago it was begun.

        Raises ValueError where some of them have not ended. short: those that have ended are the
        step; all that were its tickets when it was waited for must be among them, or filtered.
        """
        front = self.front
        if short:
            front = tuple(ticket for ticket in front if ticket in self._ended)
        if not self._ended.issuperset(front):
            raise ValueError(f"step {self.taken} is not ready: {set(front) - self._ended} are open")
        ages = {ticket: self.taken - self._begun.pop(ticket) for ticket in front}
        self._ended.difference_update(front)
        self.taken += 1
        return ages

    def publish(self) -> None:
        """The weights of the step that was taken last are there: the next version."""
        if self.version == self.taken:
            raise ValueError(f"version {self.version + 1} has no step that made it")
        self.version += 1


class Progressing(Protocol):
    """The part of rollout.sampling.OpenGroup that is looked at."""

    @property
    def ended(self) -> bool:
        """Whether none of its samples is under way."""
        ...

    @property
    def decoding(self) -> int:
        """How many of its samples an engine works on at the moment."""
        ...


class AwaitedTickets:
    """Which of some tickets have not ended, and which of these an engine decodes. Only what has
    changed is looked at: turns end one by one, and a step may have thousands of tickets.
    """

    def __init__(
        self, groups: Mapping[int, Progressing], tickets: Iterable[int], streams: int
    ) -> None:
        self._groups = groups
        self.left = set(tickets)
        self._decoding: list[set[int]] = [set() for _ in range(streams)]
        self.look_at(tuple(self.left))

    @property
    def streams(self) -> set[int]:
        """The streams in which any of them is decoded."""
        return {stream for stream, tickets in enumerate(self._decoding) if tickets}

    def decoding_beside(self, held: Collection[int]) -> set[int]:
        """Those that are decoded in other streams than `held`."""
        rest = (tickets for stream, tickets in enumerate(self._decoding) if stream not in held)
        return set[int]().union(*rest)

    def look_at(self, tickets: Iterable[int]) -> None:
        """Samples of these have ended a turn, or were answered."""
        for ticket in self.left.intersection(tickets):
            group, decoding = self._groups[ticket], self._decoding[ticket % len(self._decoding)]
            if group.decoding:
                decoding.add(ticket)
            else:
                decoding.discard(ticket)
            if group.ended:
                self.left.remove(ticket)
