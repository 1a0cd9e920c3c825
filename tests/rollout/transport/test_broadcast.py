"""Weights by broadcast, over gloo: what NCCL does between GPUs, by the same code."""

import os
import signal
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any, ClassVar

import pytest
import torch

from helpers.weights import take_over
from postgrad.core.errors import RunError
from postgrad.core.process import done
from postgrad.rollout.transport import broadcast
from postgrad.rollout.transport.broadcast import (
    BLOCKING,
    LOOPBACK,
    BroadcastCarrier,
    BroadcastGroup,
    Meeting,
    listening,
)
from postgrad.rollout.transport.parcel import Parcel
from postgrad.rollout.transport.route import Inlet, Route
from postgrad.rollout.transport.send import LocalSource, send

CPU = torch.device("cpu")
WEIGHTS = [(f"{n}.weight", torch.randn(n + 1, 9, generator=torch.manual_seed(n))) for n in range(6)]


class Receivers:
    """A target of several receivers, each with threads of its own in place of processes."""

    def __init__(self, count: int) -> None:
        self.inlets = [Inlet(CPU) for _ in range(count)]
        self.loaded: list[dict[str, Any]] = [{} for _ in range(count)]
        self.version = 0
        self._threads = ThreadPoolExecutor(count)

    def meet(self, meeting: Meeting) -> list[Any]:
        return [
            self._threads.submit(inlet.join, meeting, 1 + n) for n, inlet in enumerate(self.inlets)
        ]

    def begin_weights(self) -> None:
        for inlet in self.inlets:
            inlet.receiver.begin()

    def take_weights(self, parcel: Any) -> Any:
        def take(number: int) -> None:
            received = self.inlets[number].receiver.take(Parcel.from_json(parcel))
            self.loaded[number] |= {name: tensor.clone() for name, tensor in received}

        taking = [self._threads.submit(take, number) for number in range(len(self.inlets))]
        return All(taking)

    def commit_weights(self, version: int, manifest: Any) -> None:
        for inlet in self.inlets:
            inlet.receiver.require_complete(manifest)
        self.version = version


class All:
    def __init__(self, handles: list[Any]) -> None:
        self.handles = handles

    def result(self) -> None:
        for handle in self.handles:
            handle.result()


def test_a_model_is_broadcast_in_buckets_to_all_engines() -> None:
    listener, address = listening(LOOPBACK)
    meeting = Meeting(address, 3, "gloo")
    target = Receivers(2)
    joining = target.meet(meeting)
    group = BroadcastGroup(meeting, 0, CPU, listener)
    All(joining).result()
    for version in (1, 2):
        source = LocalSource(WEIGHTS, torch.bfloat16, BroadcastCarrier(group), 200)
        sent = send(source, target, version, Route("gloo"))
        assert sent.way == "gloo"
    assert target.version == 2
    for loaded in target.loaded:
        assert {n: t.tolist() for n, t in loaded.items()} == {
            n: t.bfloat16().tolist() for n, t in WEIGHTS
        }


def test_a_sender_that_is_killed_within_a_publish_is_noticed_and_nothing_is_committed() -> None:
    """It is killed when the receiver waits for its first bucket."""
    listener, address = listening(LOOPBACK)
    meeting = Meeting(address, 2, "gloo")
    sender = os.fork()
    if not sender:
        BroadcastGroup(meeting, 0, CPU, listener)
        os.kill(os.getpid(), signal.SIGKILL)
    listener.close()
    inlet = Inlet(CPU)
    inlet.join(meeting, 1)
    inlet.receiver.begin()
    os.waitpid(sender, 0)
    lm = torch.nn.Linear(9, 1, bias=False)
    parcel = Parcel(0, 64, "0", (), "gloo", {})
    with pytest.raises(RunError, match="a member of the group that they are sent by is gone"):
        take_over(lm, inlet.receiver.take(parcel))
    with pytest.raises(RunError, match="0 parcels with 0 tensors and 0 bytes arrived, 1 with 1"):
        inlet.receiver.require_complete({"parcels": 1, "tensors": 1, "size": 64, "digest": "0"})


class GroupOfNCCL:
    """torch's group over NCCL; groups: what each was told about waits when it was made."""

    groups: ClassVar[list[str | None]] = []

    def __init__(self, store: Any, rank: int, size: int, limit: timedelta) -> None:
        self.groups.append(os.environ.get(BLOCKING))

    def broadcast(self, payload: torch.Tensor, root: int) -> "GroupOfNCCL":
        return self

    def wait(self) -> None: ...


@pytest.mark.parametrize("before", [None, "0"])
def test_an_engine_that_is_lost_does_not_end_the_rank_by_the_watchdog_of_nccl(
    before: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.distributed, "ProcessGroupNCCL", GroupOfNCCL, raising=False)
    monkeypatch.setattr(broadcast, "make_current", lambda device: None)
    monkeypatch.setattr(GroupOfNCCL, "groups", [])
    if before is not None:
        monkeypatch.setenv(BLOCKING, before)
    listener, address = listening(LOOPBACK)
    BroadcastGroup(Meeting(address, 1, "nccl"), 0, CPU, listener)
    assert GroupOfNCCL.groups == ["1"]
    assert os.environ.get(BLOCKING) == before  # groups of ranks have their watchdog


def test_a_group_to_which_not_all_come_is_an_error() -> None:
    listener, address = listening(LOOPBACK)
    with pytest.raises(RunError, match=rf"member 0 of 2 .* at {address} \(gloo\)"):
        BroadcastGroup(Meeting(address, 2, "gloo"), 0, CPU, listener, start_seconds=0.5)


def test_the_meeting_listens_on_one_address_only() -> None:
    listener, address = listening(LOOPBACK)
    assert listener.getsockname()[0] == LOOPBACK
    assert address == f"{LOOPBACK}:{listener.getsockname()[1]}"
    listener.close()
    assert done(None).result() is None
