"""Weights that the first process hands to rollout workers: parcels as arguments of calls.

    weights -> Handover -> HandedParcel ..., WeightManifest -> ArrivingWeights -> weights

Weights are rounded to the engine's dtype before they go. An engine takes them only where counts and
checksums of what arrived are those of the manifest.
"""

import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from postgrad.core.errors import RunError
from postgrad.rollout.engine import Sent
from postgrad.rollout.transport.parcel import Parcel, Receiver, Sender, WeightManifest

WAY = "ray"  # the name in parcels and metrics: Ray carries the calls
SENT_BYTES = 2**26  # of weights in one call to a worker


@dataclass(frozen=True, slots=True)
class HandedParcel:
    """An argument of a call: Ray maps the payload's array into a worker of the same machine."""

    parcel: Mapping[str, Any]  # Parcel as JSON
    payload: NDArray[np.uint8]  # [size]


class CallCarrier:
    """Carrier of payloads that whoever leads a publish takes from it."""

    way: str = WAY
    payload: NDArray[np.uint8]  # the newest that was passed on

    def room(self, size: int) -> Tensor:
        return torch.empty(size, dtype=torch.uint8)

    def where(self) -> dict[str, Any]:
        return {}

    def pass_on(self, payload: Tensor) -> None:
        self.payload = payload.numpy()

    def close(self) -> None: ...


class CallFetcher:
    """Fetcher of the payload that the newest call brought."""

    payload: NDArray[np.uint8]

    def fetch(self, parcel: Parcel) -> Tensor:
        return torch.frombuffer(bytearray(self.payload), dtype=torch.uint8)  # Ray's is read only

    def close(self) -> None: ...


class Handover(Iterable[HandedParcel | WeightManifest]):
    """All weights of a publish as the arguments of calls, the manifest last."""

    def __init__(self, weights: Iterable[tuple[str, Tensor]], dtype: str) -> None:
        """dtype: what the engines compute in."""
        self._started = time.perf_counter()
        self._carrier = CallCarrier()
        self._sender = Sender(weights, getattr(torch, dtype), self._carrier, SENT_BYTES)

    def __iter__(self) -> Iterator[HandedParcel | WeightManifest]:
        while (parcel := self._sender.next()) is not None:
            self._sender.pass_on()
            yield HandedParcel(parcel.to_json(), self._carrier.payload)
        yield self._sender.manifest()

    def account(self) -> Sent:
        """What was sent until now, and how long it took."""
        return Sent(WAY, self._sender.manifest().size, time.perf_counter() - self._started)


class ArrivingWeights(Iterable[tuple[str, Tensor]]):
    """The weights of one publish in a rollout worker, waited for while they are iterated over."""

    def __init__(self) -> None:
        self._arrived: SimpleQueue[HandedParcel | WeightManifest | None] = SimpleQueue()
        self._fetcher = CallFetcher()
        self._receiver = Receiver({WAY: self._fetcher})

    def put(self, arrived: HandedParcel | WeightManifest | None) -> None:
        """The next that came. None: nothing more will, the publish broke off."""
        self._arrived.put(arrived)

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        """Raises RunError where anything is damaged, missing or came twice."""
        self._receiver.begin()
        while isinstance(arrived := self._arrived.get(), HandedParcel):
            self._fetcher.payload = arrived.payload
            yield from self._receiver.take(Parcel.from_json(arrived.parcel))
        if arrived is None:
            raise RunError("weights: the publish to this rollout worker broke off")
        self._receiver.require_complete(arrived.to_json())
