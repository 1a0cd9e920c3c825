"""Payloads by broadcast from one process to those of one engine: NCCL between GPUs, gloo between
hosts.

The group is apart from the default group that either side may have, and of one engine alone, so
that an engine that dies breaks no other one's. It is made through a plain TCPStore at an address of
its own, so that both sides need no more than torch; route.py says who may be in one group.
"""

import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

from postgrad.core.errors import RunError
from postgrad.parallel.device import make_current
from postgrad.rollout.transport.parcel import Parcel

START_SECONDS = 60.0  # until all members are there
LIMIT_SECONDS = 600.0  # of one broadcast
POLL_SECONDS = 0.001  # between two looks at a broadcast of NCCL
LOOPBACK = "127.0.0.1"  # where members of one machine meet
# torch's variable, read where a group is made. With it the group has no watchdog, which ends the
# whole process where a member of the group is lost or late: whoever waits gets an error.
BLOCKING = "TORCH_NCCL_BLOCKING_WAIT"


@dataclass(frozen=True, slots=True)
class Meeting:
    """Where the members of a group meet; in types of JSON."""

    address: str  # HOST:PORT
    size: int  # members: the sender, number 0, and all receivers
    backend: str  # "nccl" or "gloo"


class BroadcastGroup:
    """Member `rank` of a group; the sender is 0. Made and used by all members together."""

    def __init__(
        self,
        meeting: Meeting,
        rank: int,
        device: torch.device,
        listener: socket.socket | None = None,
        *,
        start_seconds: float = START_SECONDS,
    ) -> None:
        """listener: of the sender, from `listening`; its port is the meeting's. Raises RunError
        where not all members come within start_seconds.
        """
        self._start = timedelta(seconds=start_seconds)
        self.device = device if meeting.backend == "nccl" else torch.device("cpu")
        self.meeting = meeting
        self._abandoned = threading.Event()
        host, _, port = meeting.address.rpartition(":")
        more: dict[str, Any] = {}
        if listener is not None:
            more = {"master_listen_fd": listener.detach()}  # the store closes it
        try:
            self._store = TCPStore(
                host,
                int(port),
                meeting.size,
                rank == 0,
                self._start,
                wait_for_workers=False,
                **more,
            )
            self._group: Any = self._join(meeting, rank)
            self._group.broadcast(torch.zeros(1, device=self.device), 0).wait()  # NCCL connects
        except (RuntimeError, ValueError) as error:
            raise RunError(
                f"member {rank} of {meeting.size} of the group that weights are sent by could not "
                f"join it at {meeting.address} ({meeting.backend}): {str(error).splitlines()[0]}"
            ) from error

    def _join(self, meeting: Meeting, rank: int) -> Any:
        limit = timedelta(seconds=LIMIT_SECONDS)
        self._store.set(f"member/{rank}", "here")  # the group itself would wait for `limit`
        members = [f"member/{number}" for number in range(meeting.size)]
        self._store.wait(members, self._start)
        if meeting.backend == "nccl":
            make_current(self.device)
            kind: Any = dist.ProcessGroupNCCL  # pyright: ignore[reportAttributeAccessIssue]
            with _without_watchdog():
                return kind(self._store, rank, meeting.size, limit)
        kind = dist.ProcessGroupGloo  # pyright: ignore[reportAttributeAccessIssue]
        if not meeting.address.startswith(LOOPBACK):
            return kind(self._store, rank, meeting.size, limit)  # GLOO_SOCKET_IFNAME says where
        options = kind._Options()
        options._devices, options._timeout = [kind.create_device(hostname=LOOPBACK)], limit
        return kind(self._store, rank, meeting.size, options)

    def broadcast(self, payload: Tensor) -> None:
        """Copies the sender's payload into that of every receiver. Raises RunError where a member
        is gone.
        """
        try:
            work = self._group.broadcast(payload, 0)
            if payload.is_cuda:
                self._watch(work)
            work.wait()
            if payload.is_cuda:
                torch.cuda.synchronize(payload.device)
        except RuntimeError as error:
            raise RunError(
                "weights: a member of the group that they are sent by is gone: "
                f"{str(error).splitlines()[0]}"
            ) from error

    def abandon(self) -> None:
        """Ends a broadcast that is under way in another thread: a member is known to be gone."""
        self._abandoned.set()

    def _watch(self, work: Any) -> None:
        """Waits for a broadcast of NCCL, which by itself would wait for a dead member for ever.
        Raises RuntimeError once the time is over or the group is abandoned.
        """
        end = time.monotonic() + LIMIT_SECONDS
        while not work.is_completed():
            if self._abandoned.is_set() or time.monotonic() > end:
                self._group.abort()
                raise RuntimeError(f"NCCL's broadcast did not end in {LIMIT_SECONDS:g} seconds")
            time.sleep(POLL_SECONDS)

    def close(self) -> None:
        """Leaves the group; the other members notice."""
        abort = getattr(self._group, "abort", None)
        if self.meeting.backend == "nccl" and abort is not None:
            abort()
        del self._group


@contextmanager
def _without_watchdog() -> Iterator[None]:
    """A group of NCCL that is made inside has no watchdog."""
    before = os.environ.get(BLOCKING)
    os.environ[BLOCKING] = "1"
    try:
        yield
    finally:
        del os.environ[BLOCKING]
        if before is not None:
            os.environ[BLOCKING] = before


class BroadcastCarrier:
    """Carrier over a group, which outlives it."""

    def __init__(self, group: BroadcastGroup) -> None:
        self.way: str = group.meeting.backend
        self._group = group

    def room(self, size: int) -> Tensor:
        return torch.empty(size, dtype=torch.uint8, device=self._group.device)

    def where(self) -> dict[str, Any]:
        return {}

    def pass_on(self, payload: Tensor) -> None:
        self._group.broadcast(payload)

    def close(self) -> None: ...


class BroadcastFetcher:
    """Fetcher over a group."""

    def __init__(self, group: BroadcastGroup) -> None:
        self._group = group

    def fetch(self, parcel: Parcel) -> Tensor:
        payload = torch.empty(parcel.size, dtype=torch.uint8, device=self._group.device)
        self._group.broadcast(payload)
        return payload

    def close(self) -> None:
        self._group.close()


def listening(host: str) -> tuple[socket.socket, str]:
    """A socket that listens on one address only, and HOST:PORT."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.bind((host, 0))
    listener.listen(128)
    return listener, f"{host}:{listener.getsockname()[1]}"
