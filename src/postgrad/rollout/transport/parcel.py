"""Weights on their way to an engine: parcels of packed tensors, and the proof that all arrived.

    weights -> Sender -> Parcel (JSON) and its payload (bytes) -> Receiver -> weights

A parcel says where its payload is and how it is divided; the payload goes by a Carrier of one of
the ways: memory.py, ipc.py, broadcast.py. Parcels may arrive in any order. What arrived becomes an
engine's weights only by a commit: `Receiver.require_complete` compares it with the manifest, in
which the sender has counted what it sent.

vLLM's environment lacks postgrad's dependencies, so this folder imports the standard library and
torch only. Nothing is unpickled: the two sides exchange JSON, raw bytes and handles of fixed size.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from postgrad.core.errors import RunError

BUCKET = 1 << 28  # bytes of a payload; more where a single tensor is larger
ALIGNED = 64  # bytes: where a tensor may begin, so that any dtype can be read in place
_ROW = 1024  # words of a row of `checksum`
_MODULUS = 1 << 64
_FACTOR = 0x9E3779B97F4A7C15  # odd, so that no digest is lost by the product


@dataclass(frozen=True, slots=True)
class Packed:
    """A tensor within a payload."""

    name: str
    dtype: str  # "bfloat16"
    shape: tuple[int, ...]
    offset: int  # bytes from the payload's begin

    @property
    def size(self) -> int:
        """Its bytes in the payload."""
        return math.prod(self.shape) * getattr(torch, self.dtype).itemsize


@dataclass(frozen=True, slots=True)
class Parcel:
    """A bucket of weights that is ready to be fetched."""

    number: int  # from 0, in the order of packing
    size: int  # bytes of the payload, a multiple of ALIGNED
    checksum: str
    tensors: tuple[Packed, ...]
    way: str  # of the carrier: "memory", "ipc", "nccl", "gloo"
    where: Mapping[str, Any]  # the payload, in the words of this way

    def to_json(self) -> dict[str, Any]:
        """The parcel in types of JSON."""
        return asdict(self)

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> "Parcel":
        """The parcel that `to_json` wrote. Raises RunError where tensors leave the payload."""
        tensors = tuple(
            Packed(packed["name"], packed["dtype"], tuple(packed["shape"]), packed["offset"])
            for packed in value["tensors"]
        )
        parcel = cls(**{**value, "tensors": tensors})
        for packed in tensors:
            if packed.offset < 0 or packed.offset + packed.size > parcel.size:
                raise RunError(f"weights: {packed.name} is outside parcel {parcel.number}")
        return parcel


@dataclass(frozen=True, slots=True)
class WeightManifest:
    """What a publish consists of; a receiver that has anything else must not use it."""

    parcels: int
    tensors: int
    size: int  # bytes of all payloads
    digest: str  # of all checksums, whatever their order

    def to_json(self) -> dict[str, Any]:
        """The manifest in types of JSON."""
        return asdict(self)


class Carrier(Protocol):
    """The sender's end of a way."""

    @property
    def way(self) -> str:
        """Its name in parcels."""
        ...

    def room(self, size: int) -> Tensor:
        """[size] uint8: a payload to be filled. That of the call before stays as it is."""
        ...

    def where(self) -> dict[str, Any]:
        """Where receivers find the newest payload, which is filled now, as types of JSON."""
        ...

    def pass_on(self, payload: Tensor) -> None:
        """Hands a payload to receivers that fetch it now, where they cannot by themselves."""
        ...

    def close(self) -> None:
        """Frees all payloads of this carrier."""
        ...


class Fetcher(Protocol):
    """A receiver's end of a way."""

    def fetch(self, parcel: Parcel) -> Tensor:
        """[size] uint8: the payload, in memory that stays as it is while the tensor lives."""
        ...

    def close(self) -> None:
        """Frees what the way holds."""
        ...


class ParcelTally:
    """Counts parcels, in any order."""

    def __init__(self) -> None:
        self.numbers: set[int] = set()
        self.tensors = 0
        self.size = 0
        self._digest = 0

    def add(self, parcel: Parcel) -> None:
        """Counts a parcel. Raises RunError where it was counted before."""
        if parcel.number in self.numbers:
            raise RunError(f"weights: parcel {parcel.number} came twice")
        self.numbers.add(parcel.number)
        self.tensors += len(parcel.tensors)
        self.size += parcel.size
        self._digest += int(parcel.checksum, 16) * ((2 * parcel.number + 1) * _FACTOR)
        self._digest %= _MODULUS

    def manifest(self) -> WeightManifest:
        """The sums over what was counted."""
        return WeightManifest(len(self.numbers), self.tensors, self.size, f"{self._digest:016x}")


class Sender:
    """Packs weights into parcels, one after the other, in the engine's dtype.

    All ranks of a divided model iterate over its weights together; only those with a carrier pack.
    At most one whole tensor and two payloads are held at a time.
    """

    def __init__(
        self,
        weights: Iterable[tuple[str, Tensor]],
        dtype: torch.dtype,
        carrier: Carrier | None,
        bucket: int = BUCKET,
    ) -> None:
        """dtype: what tensors are rounded to. bucket: bytes of a payload."""
        self._weights = iter(weights)
        self._held: tuple[str, Tensor] | None = next(self._weights, None)
        self._dtype = dtype
        self._carrier = carrier
        self._bucket = bucket
        self._payload: Tensor | None = None
        self._number = 0
        self._tally = ParcelTally()

    @torch.no_grad()
    def next(self) -> Parcel | None:
        """The next parcel; None once all weights were sent, and always without a carrier."""
        if self._held is None:
            return None
        capacity = max(self._bucket, self._room_of(self._held[1]))
        room = None if self._carrier is None else self._carrier.room(capacity)
        tensors: list[Packed] = []
        used = 0
        while self._held is not None and used + self._room_of(self._held[1]) <= capacity:
            name, tensor = self._held
            dtype = str(self._dtype).removeprefix("torch.")
            packed = Packed(name, dtype, tuple(tensor.shape), used)
            if room is not None:
                _place(room, packed, tensor.detach(), self._room_of(tensor))
            tensors.append(packed)
            used += self._room_of(tensor)
            self._held = tensor = None  # freed before the next one is gathered
            self._held = next(self._weights, None)
        self._number += 1
        if room is None or self._carrier is None:
            return None
        self._payload = room[:used]
        where, way = self._carrier.where(), self._carrier.way
        digest = checksum(self._payload)
        parcel = Parcel(self._number - 1, used, digest, tuple(tensors), way, where)
        self._tally.add(parcel)
        return parcel

    @property
    def payload(self) -> Tensor | None:
        """[size] uint8: the newest payload, until the next one is packed."""
        return self._payload

    def pass_on(self) -> None:
        """Hands the newest payload to receivers that wait for it."""
        if self._carrier is not None and self._payload is not None:
            self._carrier.pass_on(self._payload)

    def manifest(self) -> WeightManifest:
        """The sums over what was sent."""
        return self._tally.manifest()

    def close(self) -> None:
        """Frees the payloads, sent or not."""
        self._payload = None
        if self._carrier is not None:
            self._carrier.close()

    def _room_of(self, tensor: Tensor) -> int:
        return -(-tensor.numel() * self._dtype.itemsize // ALIGNED) * ALIGNED


class Receiver:
    """Fetches parcels, and sees that each arrives as it was sent."""

    def __init__(self, fetchers: Mapping[str, Fetcher]) -> None:
        """fetchers: this receiver's, by way."""
        self._fetchers = fetchers
        self._tally = ParcelTally()

    def begin(self) -> None:
        """From here on, parcels are those of a new publish."""
        self._tally = ParcelTally()

    def take(self, parcel: Parcel) -> Iterator[tuple[str, Tensor]]:
        """The weights of a parcel, views of its payload. Raises RunError as `payload`."""
        payload = self.payload(parcel)
        for packed in parcel.tensors:
            part = payload[packed.offset : packed.offset + packed.size]
            yield packed.name, part.view(getattr(torch, packed.dtype)).view(packed.shape)

    def payload(self, parcel: Parcel) -> Tensor:
        """[size] uint8: the bytes of a parcel. Raises RunError where they are not what was sent, or
        the parcel came before.
        """
        if parcel.way not in self._fetchers:
            raise RunError(f"weights: this engine cannot receive them by {parcel.way!r}")
        payload = self._fetchers[parcel.way].fetch(parcel)
        arrived = checksum(payload)
        if arrived != parcel.checksum:
            raise RunError(
                f"weights: parcel {parcel.number} of {parcel.size} bytes is damaged: its checksum "
                f"was {parcel.checksum} when it was sent by {parcel.way}, and is {arrived} here"
            )
        self._tally.add(parcel)
        return payload

    def require_complete(self, sent: Mapping[str, Any]) -> None:
        """Raises RunError where what arrived since `begin` is not the manifest `sent`."""
        arrived = self._tally.manifest()
        if arrived != WeightManifest(**sent):
            missing = sorted(set(range(int(sent["parcels"]))) - self._tally.numbers)
            raise RunError(
                f"weights: {arrived.parcels} parcels with {arrived.tensors} tensors and "
                f"{arrived.size} bytes arrived, {sent['parcels']} with {sent['tensors']} and "
                f"{sent['size']} were sent (missing: {missing[:5]}): these weights are not used"
            )


def checksum(payload: Tensor) -> str:
    """A digest of [n] bytes, n a multiple of 8, as 16 hex digits: sums of rows and of columns of
    64-bit words, each with a factor of its place, modulo 2**64. It reads the payload twice where it
    lies, in no order that matters, so all devices give the same. It finds damage, not malice.
    """
    words = payload.view(torch.int64)
    rows = len(words) // _ROW
    table, rest = words[: rows * _ROW].view(rows, _ROW), words[rows * _ROW :]
    sums = [
        _weighted(table.sum(1), 3),
        _weighted(table.sum(0), 5),
        _weighted(rest, 7),
    ]
    digest = len(words)
    for value in torch.stack(sums).tolist():
        digest = (digest * _FACTOR + value) % _MODULUS
    return f"{digest:016x}"


def _weighted(words: Tensor, factor: int) -> Tensor:
    """The sum of words, each times an odd number of its place, modulo 2**64."""
    places = torch.arange(len(words), dtype=torch.int64, device=words.device)
    return (words * (2 * factor * places + factor)).sum()


def _place(room: Tensor, packed: Packed, tensor: Tensor, length: int) -> None:
    """Copies a tensor to its place, rounded; the bytes behind it up to `length` are 0."""
    end = packed.offset + packed.size
    target = room[packed.offset : end].view(getattr(torch, packed.dtype))
    target.view(packed.shape).copy_(tensor)
    room[end : packed.offset + length].zero_()
