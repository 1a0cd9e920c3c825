"""Which way weights go, chosen by where learner and engines are, and the ends of that way."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

import torch
from torch.cuda import nccl as nccl_library

from postgrad.core.errors import RunError
from postgrad.rollout.transport.broadcast import (
    BroadcastCarrier,
    BroadcastFetcher,
    BroadcastGroup,
    Meeting,
)
from postgrad.rollout.transport.ipc import Driver, IpcCarrier, IpcFetcher
from postgrad.rollout.transport.memory import MemoryCarrier, MemoryFetcher
from postgrad.rollout.transport.parcel import Carrier, Fetcher, Receiver

Stated = Literal["auto", "memory", "ipc", "broadcast"]  # rollout.transport
Way = Literal["memory", "ipc", "nccl", "gloo"]


@dataclass(frozen=True, slots=True)
class Place:
    """Where a process works that sends or receives weights; in types of JSON."""

    machine: str  # the same where processes can open each other's files in /proc
    card: str | None  # the UUID of its GPU; None: it works on the CPU
    torch_version: str
    nccl: str | None  # None without a GPU
    shares: bool  # its GPU's memory can be opened by other processes

    @classmethod
    def here(cls, device: torch.device) -> "Place":
        """That of this process, which works on `device`."""
        if device.type != "cuda":
            return cls(_machine(), None, torch.__version__, None, False)
        card = str(torch.cuda.get_device_properties(device).uuid)
        nccl = ".".join(map(str, nccl_library.version()))
        return cls(_machine(), card, torch.__version__, nccl, _shares())

    def to_json(self) -> dict[str, Any]:
        """The place in types of JSON."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Route:
    """A way, and why it is not the fastest that these cards could go, if so."""

    way: Way
    fallback: str = ""  # "": nothing is lost


def choose(stated: Stated, senders: Sequence[Place], receivers: Sequence[Place]) -> Route:
    """The way from `senders`, the ranks that all can gather whole weights, to `receivers`, all
    processes that compute samples. Raises RunError where the stated way cannot be gone.

    IPC where each engine works on a card of a rank, NCCL where rank 0 has its card for itself,
    else host memory on one machine and gloo between several.
    """
    first, machines = senders[0], {place.machine for place in (*senders[:1], *receivers)}
    host: Way = "memory" if len(machines) == 1 else "gloo"
    on_cards = all(place.card for place in (*senders, *receivers))
    if stated == "memory":
        if host != "memory":
            raise RunError(
                'rollout.transport = "memory" needs learner and engines on one machine: use "auto"'
            )
        return Route("memory")
    if not on_cards:
        if stated == "ipc":
            raise RunError('rollout.transport = "ipc" needs GPUs: use "auto"')
        return Route("gloo" if stated == "broadcast" else host)
    shared = {place.card for place in senders} >= {place.card for place in receivers}
    if stated == "ipc" or (stated == "auto" and shared):
        problem = _no_ipc(senders, receivers, shared)
        wanted: Way = "ipc"
    else:
        problem = _no_nccl(first, receivers)
        wanted = "nccl"
    if not problem:
        return Route(wanted)
    if stated != "auto":
        raise RunError(f'rollout.transport = "{stated}" cannot be used: {problem}; use "auto"')
    return Route(host, f"{wanted} cannot be used: {problem}")


def _no_ipc(senders: Sequence[Place], receivers: Sequence[Place], shared: bool) -> str:
    if not shared:
        return "an engine works on a card that no rank of the learner has"
    if not all(place.shares for place in (*senders, *receivers)):
        return "CUDA's driver cannot share memory between processes here"
    return ""


def _no_nccl(first: Place, receivers: Sequence[Place]) -> str:
    cards = [first.card, *(place.card for place in receivers)]
    if len(set(cards)) < len(cards):
        return "two of its members work on one card, which NCCL refuses"
    versions = sorted({str(place.nccl) for place in (first, *receivers)})
    if len(versions) > 1:
        return (
            f"NCCL is {first.nccl} with torch {first.torch_version} here and "
            f"{', '.join(v for v in versions if v != first.nccl)} where engines run: install the "
            "torch of one environment in the other"
        )
    return ""


def carrier_of(way: str, device: torch.device, group: BroadcastGroup | None = None) -> Carrier:
    """The sender's end of a way. group: of a broadcast."""
    if way == "memory":
        return MemoryCarrier()
    if way == "ipc":
        card = Place.here(device).card
        assert card is not None  # chosen for cards alone
        return IpcCarrier(device, card)
    assert group is not None  # both ends of a broadcast are made together
    return BroadcastCarrier(group)


class Inlet:
    """The receivers' ends of all ways in one process, which works on `device`."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._fetchers: dict[str, Fetcher] = {"memory": MemoryFetcher(device)}
        place = Place.here(device)
        if place.card is not None and place.shares:
            self._fetchers["ipc"] = IpcFetcher(device, place.card)
        self.receiver = Receiver(self._fetchers)

    def join(self, meeting: Meeting, rank: int) -> None:
        """Takes part in a group as member `rank`, in place of one before."""
        if meeting.backend in self._fetchers:
            self._fetchers[meeting.backend].close()
        group = BroadcastGroup(meeting, rank, self.device)
        self._fetchers[meeting.backend] = BroadcastFetcher(group)

    def close(self) -> None:
        """Leaves groups, frees what ways hold."""
        for fetcher in self._fetchers.values():
            fetcher.close()


@cache
def _machine() -> str:
    boot = Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip()
    return f"{boot} {Path('/proc/self/ns/pid').readlink()}"


@cache
def _shares() -> bool:
    try:
        Driver()
    except RunError:
        return False
    return True
