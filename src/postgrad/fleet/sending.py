"""Weights on their way from ranks to rollout workers: what each rank does (publishing.py leads)."""

import socket
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from postgrad.core.errors import RunError
from postgrad.parallel.ranks import ALONE, Ranks
from postgrad.rollout.transport.broadcast import BroadcastGroup, Meeting, listening
from postgrad.rollout.transport.parcel import BUCKET, Sender
from postgrad.rollout.transport.route import Place, Route, carrier_of
from postgrad.rollout.transport.send import PublishJson

# Until an engine, which is called at the same time, has come. Other ranks wait meanwhile, so that
# this one would be taken for one that hangs (cluster.pulse.STILL_SECONDS).
MEET_SECONDS = 20.0


class RankSender:
    """One rank's part of a publish. All ranks gather each tensor together; each packs those of the
    engines that it sends to.

    Methods are steps of a publish, called on all ranks at once; what each rank has to say comes
    back by rank. engines are named by their numbers.
    """

    def __init__(self, ranks: Ranks = ALONE, device: str = "cpu") -> None:
        self._ranks = ranks
        self._device = torch.device(device)
        self._listeners: dict[int, socket.socket] = {}
        self._groups: dict[int, BroadcastGroup] = {}  # with the processes of an engine
        self._sender: Sender | None = None
        self._pushed: list[int] = []  # engines that payloads are handed to

    def places(self) -> list[PublishJson]:
        """Where each of the ranks works."""
        return self._ranks.gathered(Place.here(self._device).to_json())

    def listen(self, wanted: Sequence[tuple[int, int, str]]) -> list[list[tuple[int, str]]]:
        """Opens an address for each (engine, rank, host); (engine, HOST:PORT) of each."""
        here: list[tuple[int, str]] = []
        for engine, rank, host in wanted:
            if rank == self._ranks.rank:
                self._listeners[engine], address = listening(host)
                here.append((engine, address))
        return self._ranks.gathered(here)

    def meet(self, meetings: Sequence[tuple[int, PublishJson]]) -> list[list[tuple[int, str]]]:
        """Makes the group of each engine that this rank listens for, in place of one before.
        Returns (engine, error) of those that did not come.
        """
        failed: list[tuple[int, str]] = []
        for engine, meeting in meetings:
            if (listener := self._listeners.pop(engine, None)) is None:
                continue
            self._leave(engine)
            try:
                group = BroadcastGroup(
                    Meeting(**meeting), 0, self._device, listener, start_seconds=MEET_SECONDS
                )
            except RunError as error:
                failed.append((engine, str(error)))
            else:
                self._groups[engine] = group
        return self._ranks.gathered(failed)

    def open(
        self,
        weights: Iterable[tuple[str, Tensor]],
        dtype: str,
        routes: Sequence[tuple[int, PublishJson]],
    ) -> None:
        """Begins a publish; one that broke off before is forgotten. routes: of each engine, all
        through host memory or all on cards.
        """
        self.close()
        every = [(engine, Route(**route)) for engine, route in routes]
        rank = self._ranks.rank
        served = [(e, route) for e, route in every if rank in (route.sender, *route.beside)]
        self._pushed = [engine for engine, route in served if route.pushes]
        ways = {route.way for _, route in served}
        carrier = None
        if ways & {"memory", "gloo"}:  # gloo sends from there too
            carrier = carrier_of("memory", self._device)
        elif "ipc" in ways:
            carrier = carrier_of("ipc", self._device)
        elif ways:
            carrier = carrier_of("nccl", self._device, self._groups[self._pushed[0]])
        self._sender = Sender(weights, getattr(torch, dtype), carrier, BUCKET)

    def next(self) -> list[PublishJson | None]:
        """The next parcel of each rank that sends."""
        assert self._sender is not None  # since it was opened
        parcel = self._sender.next()
        return self._ranks.gathered(None if parcel is None else parcel.to_json())

    def pass_on(self) -> list[list[tuple[int, str]]]:
        """Hands the newest payload to each engine that waits for it. Returns
        (engine, error) of those that it did not reach.
        """
        failed: list[tuple[int, str]] = []
        payload = None if self._sender is None else self._sender.payload
        for engine in list(self._pushed if payload is not None else ()):
            assert payload is not None
            try:
                self._groups[engine].broadcast(payload)
            except RunError as error:
                failed.append((engine, str(error)))
                self._pushed.remove(engine)
                self._leave(engine)
        return self._ranks.gathered(failed)

    def drop(self, engine: int) -> None:
        """Ends a broadcast to an engine that is gone. Called beside `pass_on`."""
        if (group := self._groups.get(engine)) is not None:
            group.abandon()

    def end(self) -> list[PublishJson]:
        """The manifest of each rank; payloads are freed."""
        assert self._sender is not None  # since it was opened
        manifest = self._sender.manifest().to_json()
        self.close()
        return self._ranks.gathered(manifest)

    def close(self) -> None:
        """Frees the payloads. Groups stay for the next publish."""
        if self._sender is not None:
            self._sender.close()
            self._sender = None

    def _leave(self, engine: int) -> None:
        if (group := self._groups.pop(engine, None)) is not None:
            group.close()
