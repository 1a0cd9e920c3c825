"""CUDA's shared memory, over a driver that only speaks like CUDA's. On a GPU it has not run."""

import pytest
import torch

from helpers.fake_cuda import FakeCuda
from postgrad.core.errors import RunError
from postgrad.rollout.transport.ipc import Driver, IpcCarrier, IpcFetcher
from postgrad.rollout.transport.parcel import Parcel, Receiver, Sender

CPU = torch.device("cpu")


def test_weights_pass_in_shared_memory_and_all_of_it_is_freed() -> None:
    cuda = FakeCuda()
    weights = [(str(n), torch.full((size,), float(n))) for n, size in enumerate([30, 10, 200, 5])]
    sender = Sender(weights, torch.bfloat16, IpcCarrier(CPU, "card", Driver(cuda)), 128)
    receiver = Receiver({"ipc": IpcFetcher(CPU, "card", Driver(cuda))})
    arrived: dict[str, torch.Tensor] = {}
    while (parcel := sender.next()) is not None:
        handle = parcel.where["handles"]["card"]
        assert len(bytes.fromhex(handle)) == 64
        arrived |= dict(receiver.take(Parcel.from_json(parcel.to_json())))
        assert len(cuda.memory) <= 2
        assert cuda.open == []
    receiver.require_complete(sender.manifest().to_json())
    sender.close()
    assert cuda.memory == {}
    for name, tensor in weights:  # they stay though their payloads were filled again
        assert arrived[name].tolist() == tensor.tolist()


def test_an_engine_on_another_card_is_told() -> None:
    cuda = FakeCuda()
    sender = Sender([("a", torch.ones(3))], torch.float32, IpcCarrier(CPU, "a", Driver(cuda)))
    parcel = sender.next()
    assert parcel is not None
    with pytest.raises(RunError, match="parcel 0 is not on this engine's GPU"):
        IpcFetcher(CPU, "b", Driver(cuda)).fetch(parcel)
    sender.close()
    with pytest.raises(RunError, match="cuIpcOpenMemHandle failed with CUDA's error 201"):
        IpcFetcher(CPU, "a", Driver(cuda)).fetch(parcel)


def test_a_handle_of_another_size_is_refused() -> None:
    with pytest.raises(RunError, match="has 64 bytes, this one 3"):
        Driver(FakeCuda()).open("00ff00")


def test_a_driver_that_fails_or_is_missing_is_told() -> None:
    cuda = FakeCuda()
    cuda.fails = "alloc"
    with pytest.raises(RunError, match="cuMemAlloc failed with CUDA's error 2"):
        Driver(cuda).allocate(8)
    with pytest.raises(RunError, match="CUDA's driver cannot share memory"):
        Driver(object())
