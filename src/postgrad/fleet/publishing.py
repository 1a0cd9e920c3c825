"""Publishes from ranks to rollout workers. The first process leads, and sees JSON alone:

    ranks (sending.py) -> parcels in memory, by IPC, NCCL or gloo -> rollout workers (receiving.py)

Every engine has a rank that sends to it, by a way of its own and in a group of its own, so several
ranks send at once, and an engine that dies or breaks off within a publish is lost alone: the others
go on, and its successor asks for a publish of its own. A rank that dies ends the publish: engines
that have begun it work with nothing until another one is whole.
"""

import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

from postgrad.cluster.workers import Workers
from postgrad.core.errors import RunError
from postgrad.core.process import Handle
from postgrad.fleet.remote import RankCalls, RankedWeights
from postgrad.rollout.engine import Sent
from postgrad.rollout.transport.broadcast import LOOPBACK, Meeting
from postgrad.rollout.transport.route import Place, Route, Stated, by_host, choose
from postgrad.rollout.transport.send import PublishJson


@dataclass(frozen=True, slots=True)
class EngineSeats:
    """Where one life of an engine takes weights."""

    workers: Workers
    torch_version: str  # of the process that joins groups of gloo
    places: list[Place]  # of the processes that compute


class RankPublisher:
    """Leads publishes to engines, which are named by their numbers, and keeps the ways to them."""

    def __init__(self, stated: Stated, dtype: str, lose: Callable[[int, RunError], None]) -> None:
        """stated: rollout.transport. dtype: what the engines compute in, while an adapter goes as
        float32. lose: is told of an engine that is lost, once for each.
        """
        self._stated: Stated = stated
        self._dtype = dtype
        self._lose = lose
        self._ranks: list[Place] = []  # once they were asked
        self._seats: dict[int, EngineSeats] = {}
        self.routes: dict[int, Route] = {}

    def send(
        self,
        weights: RankedWeights,
        engines: Mapping[int, Workers],
        version: int,
        after: Callable[[], None] = lambda: None,
    ) -> Sent:
        """Sends all weights to these engines. after: when all were sent, before engines take memory
        for more than weights. Raises RunError where the ranks fail.
        """
        started, group, live = time.perf_counter(), weights.group, dict(engines)
        self._find_ways(group, live)
        self._collect(live, self._call(live, "begin"))
        size = 0
        if live:
            routes = [(engine, asdict(self.routes[engine])) for engine in live]
            dtype = "float32" if weights.adapter else self._dtype
            group.call("publish", "open", weights.role, weights.adapter, dtype, routes).result()
            self._pass_parcels(group, live)
            manifests: list[PublishJson] = group.call("publish", "end").result()
            after()
            by_engine = {e: (version, manifests[self.routes[e].sender]) for e in live}
            size = max((manifest["size"] for _, manifest in by_engine.values()), default=0)
            self._collect(live, self._call(live, "commit", by_engine))
        routes = {str(engine): self.routes[engine] for engine in live}
        ways = {engine: str(route.way) for engine, route in routes.items()}
        way = "+".join(sorted(set(ways.values()))) or "none"
        fallback = next(filter(None, (route.fallback for route in routes.values())), "")
        return Sent(way, size, time.perf_counter() - started, fallback, ways)

    def _pass_parcels(self, group: RankCalls, live: dict[int, Workers]) -> None:
        """While engines load a parcel, ranks pack the next."""
        following: Handle[list[PublishJson | None]] = group.call("publish", "next")
        while live and any(parcels := following.result()):
            by_engine = {e: (parcel_of(parcels, self.routes[e]),) for e in live}
            taking = self._call(live, "take", by_engine)
            if any(self.routes[engine].pushes for engine in live):
                self._drop_where_lost(group, taking)
                broken = group.call("publish", "pass_on").result()
                self._lose_all(live, broken)
            following = group.call("publish", "next")
            self._collect(live, {e: taking[e] for e in taking if e in live})

    def _drop_where_lost(self, group: RankCalls, taking: Mapping[int, Handle[Any]]) -> None:
        """A rank that waits for an engine in NCCL is told once that engine is gone."""

        def tell(engine: int, handle: Handle[Any]) -> None:
            if handle.exception() is not None:
                with suppress(RunError):  # the ranks have ended, whose own error is on its way
                    group.aside("drop_engine", engine)

        for engine, handle in taking.items():
            if self.routes[engine].way == "nccl":
                handle.add_done_callback(lambda ended, engine=engine: tell(engine, ended))

    def _find_ways(self, group: RankCalls, live: dict[int, Workers]) -> None:
        """Chooses the way to each engine anew, and makes the groups that are missing."""
        if not self._ranks:
            self._ranks = [Place(**p) for p in group.call("publish", "places").result()]
        seats = self._seats
        unasked = {e: w for e, w in live.items() if e not in seats or seats[e].workers is not w}
        answers = self._collect(live, self._call(unasked, "places"))
        for engine, (version, places) in answers.items():
            self.routes.pop(engine, None)
            seats[engine] = EngineSeats(live[engine], version, [Place(**p) for p in places])
        routes = {e: choose(self._stated, self._ranks, self._seats[e].places, e) for e in live}
        if len({route.on_card for route in routes.values()}) > 1:  # a payload lies at one place
            reason = next(filter(None, (route.fallback for route in routes.values())), "")
            routes = {
                e: by_host("auto", self._ranks, self._seats[e].places, e, reason) for e in live
            }
        before = self.routes
        self.routes = {**before, **routes}
        self._meet(
            group,
            live,
            [e for e, route in routes.items() if route.pushes and before.get(e) != route],
        )

    def _meet(self, group: RankCalls, live: dict[int, Workers], engines: list[int]) -> None:
        """Makes a group of each of these engines and its rank, at an address of its own."""
        if not engines:
            return
        wanted = [(e, self.routes[e].sender, self._host(group, e)) for e in engines]
        listening = group.call("publish", "listen", wanted).result()
        meetings: dict[int, tuple[PublishJson]] = {}
        for engine, address in (pair for of_rank in listening for pair in of_rank):
            way, places = self.routes[engine].way, self._seats[engine].places
            members = 1 + (len(places) if way == "nccl" else 1)
            meetings[engine] = (asdict(Meeting(address, members, way)),)
        joining = self._call(live, "meet", meetings)
        absent = group.call(
            "publish", "meet", [(engine, meeting) for engine, (meeting,) in meetings.items()]
        ).result()
        self._collect(live, joining)
        self._lose_all(live, absent)

    def _host(self, group: RankCalls, engine: int) -> str:
        """The address at which an engine's rank listens for it. Raises RunError where they could
        not speak with each other over gloo.
        """
        route, seats = self.routes[engine], self._seats[engine]
        rank = self._ranks[route.sender]
        if route.way == "gloo" and rank.torch_version != seats.torch_version:
            raise RunError(
                f"rollout worker {engine} has torch {seats.torch_version} and rank {route.sender} "
                f"{rank.torch_version}: all machines of a run need the same packages"
            )
        near = all(place.machine == rank.machine for place in seats.places)
        return LOOPBACK if near else group.places[route.sender][0]

    def _call(
        self,
        live: Mapping[int, Workers],
        action: str,
        arguments: Mapping[int, tuple[Any, ...]] | None = None,
    ) -> dict[int, Handle[Any]]:
        """Calls a step of engines, those that have arguments where some are given."""
        handles: dict[int, Handle[Any]] = {}
        for engine, workers in live.items():
            if arguments is None or engine in arguments:
                more = () if arguments is None else arguments[engine]
                try:
                    handles[engine] = workers.call("publish", action, *more)
                except RunError as error:  # it has ended
                    handles[engine] = Handle()
                    handles[engine].set_exception(error)
        return handles

    def _collect(
        self, live: dict[int, Workers], handles: Mapping[int, Handle[Any]]
    ) -> dict[int, Any]:
        """The values of a step. An engine that raises is lost, whatever the error: it has no whole
        weights, and its process has ended.
        """
        values: dict[int, Any] = {}
        for engine, handle in handles.items():
            try:
                values[engine] = handle.result()
            except RunError as error:
                self._lost(live, engine, error)
        return values

    def _lose_all(self, live: dict[int, Workers], errors: list[list[tuple[int, str]]]) -> None:
        for engine, error in (pair for of_rank in errors for pair in of_rank):
            self._lost(live, engine, RunError(f"rollout worker {engine}: {error}"))

    def _lost(self, live: dict[int, Workers], engine: int, error: RunError) -> None:
        if live.pop(engine, None) is not None:
            self._seats.pop(engine, None)
            self.routes.pop(engine, None)
            self._lose(engine, error)


def parcel_of(parcels: list[PublishJson | None], route: Route) -> PublishJson:
    """The parcel that an engine takes: on each of its cards the payload of the rank there, which
    has packed the same.
    """
    parcel = parcels[route.sender]
    assert parcel is not None  # all ranks that send have equally many
    if not route.beside:
        return {**parcel, "way": route.way}
    handles: dict[str, str] = {}
    for rank in (route.sender, *route.beside):
        packed = parcels[rank]
        assert packed is not None
        handles |= packed["where"]["handles"]
    return {**parcel, "way": route.way, "where": {"handles": handles}}
