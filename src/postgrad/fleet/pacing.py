"""How far each process of a shared engine goes before it is cut."""

from collections.abc import Collection, Sequence
from typing import Any

from postgrad.core.errors import RunError, WorkerLost
from postgrad.fleet.members import Member
from postgrad.rollout.engine import Request
from postgrad.rollout.free import Track
from postgrad.rollout.stats import named


class TurnPace:
    """A process goes on while it has a sample that is awaited, so that where a cut finds it depends
    on samples alone.
    """

    stopped = False  # no turn begins any more

    def goes_on(self, member: Member, awaited: Collection[int] | None) -> bool:
        """Whether a process may begin a turn, or is at one."""
        return member.has(awaited)

    def next_turn(self, member: Member) -> tuple[Any, ...]:
        """The arguments of the turn that a process begins: what is waiting for it, first of all."""
        requests, member.waiting = member.waiting, []
        return (requests,)

    def stop(self) -> None:
        """Nothing: such a process stops by itself."""

    def note_lost(self, member: Member) -> None:
        """A process was lost: its samples go on in others. Raises WorkerLost where none may."""


class FreePace(TurnPace):
    """Every process goes on until it is stopped, or has repeated its track. rollout/free.py."""

    def __init__(
        self, number: int, members: Sequence[Member], tracks: Sequence[Track] | None
    ) -> None:
        """number: differs from that of every pace before, so that a late stop of one of them stops
        nothing.
        """
        self.number = number
        self._members = members
        self._tracks = tracks
        self._first = [self._sums(member) for member in members]
        self._arrivals: list[dict[int, list[int]]] = [{} for _ in members]
        self._tickets: list[set[int]] = [set() for _ in members]  # that each has been given
        self._lost: set[int] = set()

    def goes_on(self, member: Member, awaited: Collection[int] | None) -> bool:
        if self._tracks is None:
            return member.has(None)
        if member.asked is not None:
            return True
        track, at = self._tracks[member.number], self._steps(member)
        _, late = self._due(member)
        waiting = {request.ticket for request in member.waiting}
        missing = set(track.arrivals.get(at, ())) - waiting - self._tickets[member.number]
        is_late = sum(len(request.sample_ids) for request in late)
        return at < track.decode_steps and not missing and len(member.open) > is_late

    def next_turn(self, member: Member) -> tuple[Any, ...]:
        at = self._steps(member)
        requests, member.waiting = self._due(member)
        earlier = self._tickets[member.number]
        new = dict.fromkeys(r.ticket for r in requests if r.ticket not in earlier)
        if new:
            self._arrivals[member.number].setdefault(at, []).extend(new)
            earlier.update(new)
        most = None
        if self._tracks is not None:
            most = self._tracks[member.number].decode_steps - at
        return requests, self.number, most

    def stop(self) -> None:
        if self._tracks is not None:  # which say where
            return
        self.stopped = True
        for member in self._members:
            if (workers := member.workers) is not None and member.serves:
                try:
                    workers.aside("stop", self.number)
                except RunError:  # it has ended, which its turn tells
                    continue

    def note_lost(self, member: Member) -> None:
        if self._tracks is not None:
            raise WorkerLost(
                f"rollout worker {member.number} died, and a replay needs each of them"
            )
        self._lost.add(member.number)

    def tracks(self) -> list[Track]:
        """What each process has done. What came after its last decode step made no difference."""
        tracks: list[Track] = []
        for member, arrivals in zip(self._members, self._arrivals, strict=True):
            now, first = self._sums(member), self._first[member.number]
            steps, tokens = now[0] - first[0], now[1] - first[1]
            # vLLM's steps are not counted: all its tickets come before step 0.
            counts = bool(steps) or not tokens
            came = {at: tuple(t) for at, t in arrivals.items() if at < steps or not counts}
            tracks.append(Track(steps, tokens, came, member.number in self._lost))
        return tracks

    def _due(self, member: Member) -> tuple[list[Request], list[Request]]:
        """What waits for a process: what it gets in its next turn, and what came later where its
        track was recorded.
        """
        if self._tracks is None:
            return member.waiting, []
        came = self._tracks[member.number].arrivals.get(self._steps(member), ())
        due = self._tickets[member.number].union(came)
        return (
            [request for request in member.waiting if request.ticket in due],
            [request for request in member.waiting if request.ticket not in due],
        )

    def _steps(self, member: Member) -> int:
        return self._sums(member)[0] - self._first[member.number][0]

    @staticmethod
    def _sums(member: Member) -> tuple[int, int]:
        """Decode steps and tokens of all processes that had a member's number."""
        sums = named(member.spent[0], ("decode_steps", "response_tokens"))
        return int(sums["decode_steps"]), int(sums["response_tokens"])
