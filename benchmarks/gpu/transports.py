"""Cases of part "step": seconds a gigabyte of each way of weights to an engine's process."""

import multiprocessing
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from statistics import median
from typing import Any

import torch

from benchmarks.gpu.session import Result, Session, Skipped
from benchmarks.gpu.work import sent_bytes
from postgrad.rollout.transport.broadcast import LOOPBACK, BroadcastGroup, Meeting, listening
from postgrad.rollout.transport.parcel import Parcel
from postgrad.rollout.transport.route import Inlet, Route, Way, carrier_of
from postgrad.rollout.transport.send import AwaitedStep, LocalSource, send

TENSORS, ROUNDS = 16, 3
LIMIT_SECONDS = 60.0  # of one step of the receiver


def sent(session: Session, way: Way) -> Result:
    """Publishes to another process, as to an engine: the median of ROUNDS after one to warm up."""
    cards = torch.cuda.device_count() if session.device == "cuda" else 0
    if way == "ipc" and not cards:
        raise Skipped("CUDA IPC needs a GPU")
    if way == "nccl" and cards < 2:
        raise Skipped("NCCL refuses two processes on one card: two are needed")
    here = torch.device(session.device, 0) if cards else torch.device("cpu")
    there = torch.device("cuda", 1) if way == "nccl" else here
    count = sent_bytes(session.small) // TENSORS // torch.bfloat16.itemsize
    weights = [
        (str(n), torch.full((count,), float(n), dtype=torch.bfloat16, device=here))
        for n in range(TENSORS)
    ]
    seconds: list[float] = []
    with receiving(there) as target:
        group = target.meet(way, here) if way in ("nccl", "gloo") else None
        for version in range(1 + ROUNDS):
            carrier = carrier_of(way, here, group)
            source = LocalSource(weights, torch.bfloat16, carrier)
            delivery = send(source, target, version, Route(way))
            seconds.append(delivery.seconds)
        if group is not None:
            group.close()
    took = median(seconds[1:])
    return {"bytes": delivery.size, "seconds": took, "seconds_per_gb": took / delivery.size * 1e9}


class FarTarget:
    """The target of a publish in a process of its own; the pipe has JSON, as with an engine."""

    def __init__(self, pipe: Any) -> None:
        self._pipe = pipe

    def ask(self, action: str, value: Any = None) -> Callable[[], None]:
        """Begins a step; what it returns waits for its end."""
        self._pipe.send((action, value))

        def wait() -> None:
            if not self._pipe.poll(LIMIT_SECONDS):
                raise TimeoutError(f"the receiver did not end {action} in {LIMIT_SECONDS:g} s")
            self._pipe.recv()

        return wait

    def meet(self, way: Way, device: torch.device) -> BroadcastGroup:
        """A group of the two processes."""
        listener, address = listening(LOOPBACK)
        meeting = Meeting(address, 2, way)
        joined = self.ask("join", asdict(meeting))
        group = BroadcastGroup(meeting, 0, device, listener)
        joined()
        return group

    def begin_weights(self) -> None:
        self.ask("begin")()

    def take_weights(self, parcel: Mapping[str, Any]) -> AwaitedStep:
        return Taken(self.ask("take", dict(parcel)))

    def commit_weights(self, version: int, manifest: Mapping[str, Any]) -> None:
        del version
        self.ask("commit", dict(manifest))()


class Taken:
    """A parcel that is under way."""

    def __init__(self, wait: Callable[[], None]) -> None:
        self._wait = wait

    def result(self) -> None:
        self._wait()


@contextmanager
def receiving(device: torch.device) -> Iterator[FarTarget]:
    """A process that takes weights on `device`."""
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    process = spawn.Process(target=receive, args=(theirs, str(device)), daemon=True)
    process.start()
    try:
        yield FarTarget(ours)
    finally:
        process.terminate()
        process.join()


def receive(pipe: Any, device: str) -> None:
    """Loads what is sent, as an engine does: each tensor is copied into the one before."""
    inlet, loaded = Inlet(torch.device(device)), dict[str, torch.Tensor]()
    while True:
        action, value = pipe.recv()
        if action == "join":
            inlet.join(Meeting(**value), 1)
        elif action == "begin":
            inlet.receiver.begin()
        elif action == "take":
            for name, tensor in inlet.receiver.take(Parcel.from_json(value)):
                loaded.setdefault(name, torch.empty_like(tensor)).copy_(tensor)
            if device != "cpu":
                torch.cuda.synchronize(device)
        else:
            inlet.receiver.require_complete(value)
        pipe.send(True)
