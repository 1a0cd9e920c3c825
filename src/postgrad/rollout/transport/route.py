"""Which way weights go to an engine and who sends them, chosen by where ranks and the engine's
processes are; and the ends of that way.
"""

import platform
import sys
import uuid
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

    machine: str  # on Linux the same where processes can open each other's files in /proc
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
    """A way to one engine, who sends, and why it is not the fastest that these cards could go."""

    way: Way
    sender: int = 0  # rank, of those that were asked
    fallback: str = ""  # "": nothing is lost
    beside: tuple[int, ...] = ()  # ranks that pack the same, for further cards of the engine

    @property
    def pushes(self) -> bool:
        """Whether the sender has to hand payloads over: receivers cannot fetch by themselves."""
        return self.way in ("nccl", "gloo")

    @property
    def on_card(self) -> bool:
        """Whether payloads lie on the sender's GPU."""
        return self.way in ("ipc", "nccl")


def choose(
    stated: Stated, senders: Sequence[Place], receivers: Sequence[Place], number: int = 0
) -> Route:
    """The way to one engine. senders: all ranks, each of which can gather whole weights. receivers:
    the engine's processes that compute. number: of the engine; engines that several ranks could
    serve are shared out by it. Raises RunError where the stated way cannot be gone.

    IPC from the ranks that work on the engine's cards, NCCL from a rank on another card, else host
    memory from a rank on the engine's machine, and gloo where there is none.
    """
    if stated == "memory" or not all(place.card for place in (*senders, *receivers)):
        if stated == "ipc":
            raise RunError('rollout.transport = "ipc" needs GPUs: use "auto"')
        return by_host(stated, senders, receivers, number)
    ipc = None if stated == "broadcast" else _by_ipc(senders, receivers)
    if stated == "ipc" and ipc is None:
        ipc = Route("ipc", 0, "the engine works on a card that no rank of the learner has")
    route = ipc or _by_nccl(senders, receivers, number)
    if not route.fallback:
        return route
    if stated != "auto":
        problem = f'rollout.transport = "{stated}" cannot be used: {route.fallback}'
        raise RunError(f'{problem}; use "auto"')
    problem = f"{route.way} cannot be used: {route.fallback}"
    return by_host(stated, senders, receivers, number, problem)


def _by_ipc(senders: Sequence[Place], receivers: Sequence[Place]) -> Route | None:
    """By memory of cards, where a sender works on each card of the receivers; None where that is
    not so. `fallback` says why it cannot be gone.
    """
    ranks = {sender.card: rank for rank, sender in reversed(list(enumerate(senders)))}
    if not all(place.card in ranks for place in receivers):
        return None
    first, *others = dict.fromkeys(ranks[place.card] for place in receivers)
    shared = all(place.shares for place in (*(senders[r] for r in (first, *others)), *receivers))
    problem = "" if shared else "CUDA's driver cannot share memory between processes here"
    return Route("ipc", first, problem, tuple(others))


def _by_nccl(senders: Sequence[Place], receivers: Sequence[Place], number: int) -> Route:
    """From a rank whose card has none of the receivers, one of their machine if there is one.
    `fallback` says why it cannot be gone.
    """
    cards = {place.card for place in receivers}
    apart = [rank for rank, sender in enumerate(senders) if sender.card not in cards]
    if not apart or len(cards) < len(receivers):
        return Route("nccl", 0, "two of its members work on one card, which NCCL refuses")
    near = [rank for rank in apart if senders[rank].machine == receivers[0].machine] or apart
    sender = near[number % len(near)]
    first = senders[sender]
    others = sorted({str(place.nccl) for place in receivers} - {str(first.nccl)})
    problem = (
        f"NCCL is {first.nccl} with torch {first.torch_version} here and {', '.join(others)} where "
        "engines run: install the torch of one environment in the other"
    )
    return Route("nccl", sender, problem if others else "")


def by_host(
    stated: Stated,
    senders: Sequence[Place],
    receivers: Sequence[Place],
    number: int,
    fallback: str = "",
) -> Route:
    """The way through host memory: that of a machine that a rank and the engine share, else gloo.
    The parameters are those of `choose`; fallback: of the route. Raises RunError as `choose`.
    """
    machines = {place.machine for place in receivers}
    near = [rank for rank, sender in enumerate(senders) if machines == {sender.machine}]
    ranks = near or list(range(len(senders)))
    if not near and stated == "memory":
        raise RunError(
            'rollout.transport = "memory" needs a rank on the machine of each engine: use "auto"'
        )
    mapped = near and sys.platform == "linux"  # what the files in memory are made and opened with
    if stated == "memory" and not mapped:
        raise RunError('rollout.transport = "memory" needs Linux: use "auto"')
    way: Way = "memory" if mapped and stated != "broadcast" else "gloo"
    return Route(way, ranks[number % len(ranks)], fallback)


def carrier_of(way: Way, device: torch.device, group: BroadcastGroup | None = None) -> Carrier:
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
            self._fetchers.pop(meeting.backend).close()
        group = BroadcastGroup(meeting, rank, self.device)
        self._fetchers[meeting.backend] = BroadcastFetcher(group)

    def close(self) -> None:
        """Leaves groups, frees what ways hold."""
        for fetcher in self._fetchers.values():
            fetcher.close()


@cache
def _machine() -> str:
    if sys.platform != "linux":  # no /proc: weights go by gloo there
        return f"{platform.node()} {uuid.getnode():x}"
    boot = Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip()
    return f"{boot} {Path('/proc/self/ns/pid').readlink()}"


@cache
def _shares() -> bool:
    try:
        Driver()
    except RunError:
        return False
    return True
