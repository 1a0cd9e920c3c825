"""Weights on their way from ranks to rollout workers: what a rank does, and who leads it.

The payloads go from the ranks to the workers. The first process leads: only JSON passes through it.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from postgrad.core.process import Handle
from postgrad.parallel.ranks import Ranks
from postgrad.rollout.transport.broadcast import (
    LOOPBACK,
    BroadcastGroup,
    Meeting,
    listening,
    own_address,
)
from postgrad.rollout.transport.parcel import BUCKET, Sender, WeightManifest
from postgrad.rollout.transport.route import Place, Route, Stated, carrier_of, choose
from postgrad.rollout.transport.send import AwaitedStep, Sent, send


class SendsWeights(Protocol):
    """A role with weights to send."""

    def hub_weights(self) -> Iterator[tuple[str, Tensor]]: ...

    def adapter_weights(self) -> Iterator[tuple[str, Tensor]]: ...


class RankSender:
    """The source of a publish on one rank. All ranks gather each tensor together; rank 0 packs it,
    and with IPC every rank for the engine on its own card.
    """

    def __init__(self, ranks: Ranks, device: torch.device) -> None:
        self._ranks = ranks
        self._device = device
        self._listener: Any = None
        self._groups: dict[str, BroadcastGroup] = {}
        self._sender: Sender | None = None
        self._everywhere = False  # every rank packs

    def places(self, on_host: bool) -> list[dict[str, Any]]:
        """Of all ranks. on_host: weights are sent from the host's memory."""
        device = torch.device("cpu") if on_host else self._device
        return self._ranks.gathered(Place.here(device).to_json())

    def listen(self, near: bool) -> str:
        """Where rank 0 waits for the members of a group. near: all are on its machine."""
        if self._ranks.rank:
            return ""
        self._listener, address = listening(LOOPBACK if near else own_address())
        return address

    def meet(self, meeting: Mapping[str, Any]) -> None:
        """Rank 0 makes the group; returns when all members have come."""
        if not self._ranks.rank:
            where = Meeting(**meeting)
            self._groups[where.backend] = BroadcastGroup(where, 0, self._device, self._listener)

    def open(self, role: SendsWeights, adapter: bool, dtype: str, way: str, bucket: int) -> None:
        """Begins a publish; one that broke off before is forgotten."""
        self.close()
        self._everywhere = way == "ipc"
        packs = self._everywhere or not self._ranks.rank
        carrier = carrier_of(way, self._device, self._groups.get(way)) if packs else None
        weights = role.adapter_weights() if adapter else role.hub_weights()
        self._sender = Sender(weights, getattr(torch, dtype), carrier, bucket)

    def next(self) -> dict[str, Any] | None:
        """Source.next on every rank. With IPC a parcel has the handles of all ranks."""
        assert self._sender is not None  # since it was opened
        parcel = self._sender.next()
        if self._everywhere:
            wheres = self._ranks.gathered(None if parcel is None else dict(parcel.where))
            if parcel is not None:
                handles = {c: h for where in wheres for c, h in where["handles"].items()}
                parcel = replace(parcel, where={"handles": handles})
        return None if parcel is None else parcel.to_json()

    def pass_on(self) -> None:
        """Source.pass_on, of rank 0."""
        if self._sender is not None and not self._ranks.rank:
            self._sender.pass_on()

    def end(self) -> dict[str, Any]:
        """The manifest of what was sent; frees the payloads."""
        assert self._sender is not None  # since it was opened
        manifest: WeightManifest = self._sender.manifest()
        self.close()
        return manifest.to_json()

    def close(self) -> None:
        """Frees the payloads of a publish, ended or not."""
        if self._sender is not None:
            self._sender.close()
            self._sender = None


class CallsAll(Protocol):
    """Processes that all get a call: ranks, of which rank 0 answers, or rollout workers."""

    def call(self, method: str, *arguments: Any) -> Handle[Any]: ...


class CallsEach(CallsAll, Protocol):
    """Rollout workers, which can be called one by one."""

    size: int

    def ask(self, number: int, method: str, *arguments: Any) -> Handle[Any]: ...


class RankedWeights(Iterable[tuple[str, Tensor]]):
    """The weights of a role on ranks, or of its adapter: to be sent from there to workers
    (`publish`), or iterated over here, some at a time, for an engine in this process.
    """

    def __init__(self, group: CallsAll, role: str, *, adapter: bool = False) -> None:
        self._group = group
        self._role = role
        self._adapter = adapter

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        first = True
        while some := self._group.call("send", self._role, first, self._adapter).result():
            yield from some
            first = False

    def publish(
        self, workers: CallsEach, routes: "Routes", dtype: str, version: int, after: Any
    ) -> Sent:
        """Sends them to all workers, rounded to `dtype`. after: see rollout.transport.send."""
        route = routes.to(workers, self._group, self._adapter)
        arguments = (self._role, self._adapter, dtype, route.way, BUCKET)
        self._group.call("weights", "open", *arguments).result()
        target = _OnWorkers(workers, self._adapter)
        return send(_OnGroup(self._group), target, version, route, after)


class Routes:
    """The ways from ranks to workers, each chosen at its first publish."""

    def __init__(self, stated: Stated) -> None:
        """stated: the recipe's rollout.transport."""
        self._stated: Stated = stated
        self._chosen: dict[bool, Route] = {}

    def to(self, workers: CallsEach, group: CallsAll, adapter: bool) -> Route:
        """The way of whole weights, or of an adapter, which goes through the host's memory."""
        if adapter not in self._chosen:
            senders = [Place(**p) for p in group.call("weights", "places", adapter).result()]
            asked = [workers.ask(n, "weights", "places", adapter) for n in range(workers.size)]
            places = [[Place(**place) for place in handle.result()] for handle in asked]
            receivers = [place for of_worker in places for place in of_worker]
            stated = "auto" if adapter and self._stated == "ipc" else self._stated
            route = choose(stated, senders, receivers)
            if route.way in ("nccl", "gloo"):
                seats = [len(p) if route.way == "nccl" else 1 for p in places]
                near = len({p.machine for p in (senders[0], *receivers)}) == 1
                _meet(workers, group, route.way, seats, near=near)
            self._chosen[adapter] = route
        return self._chosen[adapter]


def _meet(
    workers: CallsEach, group: CallsAll, backend: str, seats: list[int], *, near: bool
) -> None:
    """Makes a group of rank 0 and all workers, which have so many seats each."""
    address = group.call("weights", "listen", near).result()
    meeting = asdict(Meeting(address, 1 + sum(seats), backend))
    joining = [
        workers.ask(number, "weights", "meet", meeting, 1 + sum(seats[:number]))
        for number in range(workers.size)
    ]
    group.call("weights", "meet", meeting).result()
    for handle in joining:
        handle.result()


class _OnGroup:
    """The source of a publish on ranks."""

    def __init__(self, group: CallsAll) -> None:
        self._group = group

    def next(self) -> AwaitedStep:
        return self._group.call("weights", "next")

    def pass_on(self) -> AwaitedStep:
        return self._group.call("weights", "pass_on")

    def end(self) -> dict[str, Any]:
        return self._group.call("weights", "end").result()

    def abandon(self) -> None:
        """Does nothing: the ranks may be gone, and free the payloads before the next publish."""


class _OnWorkers:
    """The target of a publish in workers: all of them, at once."""

    def __init__(self, workers: CallsAll, adapter: bool) -> None:
        self._workers = workers
        self._adapter = adapter

    def begin_weights(self) -> None:
        self._workers.call("weights", "begin", self._adapter).result()

    def take_weights(self, parcel: Mapping[str, Any]) -> AwaitedStep:
        return self._workers.call("weights", "take", dict(parcel))

    def commit_weights(self, version: int, manifest: Mapping[str, Any]) -> None:
        self._workers.call("weights", "commit", version, dict(manifest)).result()
