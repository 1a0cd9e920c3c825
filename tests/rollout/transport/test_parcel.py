"""Parcels: what is sent is what arrives, in any order, or nobody uses it."""

import itertools
import os
import signal
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from postgrad.core.errors import RunError
from postgrad.rollout.transport.memory import MemoryCarrier, MemoryFetcher
from postgrad.rollout.transport.parcel import BUCKET, Parcel, Receiver, Sender, checksum

FACTOR, MODULUS = 0x9E3779B97F4A7C15, 2**64


def packed(weights: Any, dtype: torch.dtype = torch.float32, bucket: int = 256) -> Any:
    """All parcels of some weights, their sender and the receiver's end of host memory."""
    carrier = Keeping()
    sender = Sender(weights, dtype, carrier, bucket)
    parcels: list[Parcel] = []
    while (parcel := sender.next()) is not None:
        parcels.append(Parcel.from_json(parcel.to_json()))
    return parcels, sender, Receiver({"memory": MemoryFetcher()})


class Keeping(MemoryCarrier):
    """Payloads that stay until the carrier is closed, so that a test can take them in any order."""

    def room(self, size: int) -> torch.Tensor:
        self._kept = [*getattr(self, "_kept", []), *map(os.dup, self._files)]
        return super().room(size)

    def where(self) -> dict[str, Any]:
        here = os.dup(self._files[-1])
        self._kept.append(here)
        return {"path": f"/proc/{os.getpid()}/fd/{here}"}

    def close(self) -> None:
        super().close()
        for file in self._kept:
            os.close(file)


def some_weights(count: int = 5) -> list[tuple[str, torch.Tensor]]:
    return [(f"layer.{n}", torch.arange(n * 7.0, n * 7.0 + 30).view(5, 6)) for n in range(count)]


@given(
    sizes=st.lists(st.integers(1, 40), min_size=1, max_size=10),
    bucket=st.integers(64, 400),
    order=st.randoms(use_true_random=False),
)
def test_every_weight_arrives_once_whatever_the_order_of_parcels(
    sizes: list[int], bucket: int, order: Any
) -> None:
    weights = [(str(n), torch.full((size,), float(n))) for n, size in enumerate(sizes)]
    parcels, sender, receiver = packed(weights, bucket=bucket)
    with closing(sender):  # hypothesis may end an example where it draws
        order.shuffle(parcels)
        arrived = [pair for parcel in parcels for pair in receiver.take(parcel)]
        receiver.require_complete(sender.manifest().to_json())
    assert len(arrived) == len(weights)
    for name, tensor in weights:
        torch.testing.assert_close(dict(arrived)[name], tensor, rtol=0, atol=0)
    assert all(parcel.size <= max(bucket, 192) for parcel in parcels)


def test_weights_are_rounded_and_laid_out_anew() -> None:
    weight = torch.arange(6.0).view(2, 3).t() + 1e-3
    (parcel,), sender, receiver = packed([("a", weight)], torch.bfloat16)
    weight.zero_()
    ((_, tensor),) = receiver.take(parcel)
    assert tensor.dtype == torch.bfloat16
    assert tensor.tolist() == [[2**-10 + 2**-15 - 2**-17, 3], [1, 4], [2, 5]]
    sender.close()


@pytest.mark.parametrize("lost", [0, 2, 4])
def test_a_parcel_that_is_missing_is_named_and_nothing_is_committed(lost: int) -> None:
    parcels, sender, receiver = packed(some_weights(), bucket=128)
    for parcel in parcels:
        if parcel.number != lost:
            list(receiver.take(parcel))
    with pytest.raises(RunError, match=rf"4 parcels .* 5 with 5 .*missing: \[{lost}\]"):
        receiver.require_complete(sender.manifest().to_json())
    sender.close()


def test_a_parcel_that_comes_twice_is_refused() -> None:
    parcels, sender, receiver = packed(some_weights())
    list(receiver.take(parcels[1]))
    with pytest.raises(RunError, match="parcel 1 came twice"):
        list(receiver.take(parcels[1]))
    sender.close()


@pytest.mark.parametrize("place", [0, 100, 127])
def test_a_damaged_payload_is_refused(place: int) -> None:
    (parcel,), sender, receiver = packed(some_weights(1))
    with open(parcel.where["path"], "r+b") as file:  # noqa: PTH123
        file.seek(place)
        byte = file.read(1)
        file.seek(place)
        file.write(bytes([byte[0] ^ 1]))
    with pytest.raises(RunError, match="parcel 0 of 128 bytes is damaged"):
        list(receiver.take(parcel))
    sender.close()


def test_parcels_of_another_publish_do_not_complete_this_one() -> None:
    """The first breaks off after two parcels; its sender is then asked again."""
    old, old_sender, receiver = packed([(n, w + 1) for n, w in some_weights()])
    receiver.begin()
    for parcel in old[:2]:
        list(receiver.take(parcel))
    new, sender, _ = packed(some_weights())
    for parcel in new[2:]:
        list(receiver.take(parcel))
    with pytest.raises(RunError, match="these weights are not used"):
        receiver.require_complete(sender.manifest().to_json())
    receiver.begin()
    for parcel in new:
        list(receiver.take(parcel))
    receiver.require_complete(sender.manifest().to_json())
    for each in (old_sender, sender):
        each.close()


def test_a_tensor_outside_its_parcel_is_refused() -> None:
    (parcel,), sender, _ = packed(some_weights(1))
    outside = replace(parcel.tensors[0], offset=64)
    with pytest.raises(RunError, match=r"layer\.0 is outside parcel 0"):
        Parcel.from_json(replace(parcel, tensors=(outside,)).to_json())
    sender.close()


def test_a_way_that_an_engine_lacks_is_an_error() -> None:
    (parcel,), sender, receiver = packed(some_weights(1))
    with pytest.raises(RunError, match="cannot receive them by 'ipc'"):
        list(receiver.take(replace(parcel, way="ipc")))
    sender.close()


def test_a_sender_that_was_killed_is_an_error_of_the_receiver() -> None:
    """A child packs a parcel, tells where it is, and is killed before it is read."""
    ends, tells = os.pipe()
    child = os.fork()
    if not child:
        sender = Sender(some_weights(1), torch.float32, MemoryCarrier(), 256)
        parcel = sender.next()
        assert parcel is not None
        os.write(tells, parcel.where["path"].encode())
        signal.pause()
    path = os.read(ends, 100).decode()
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    (parcel,), sender, receiver = packed(some_weights(1))
    with pytest.raises(RunError, match="did the process that sends weights end"):
        list(receiver.take(replace(parcel, where={"path": path})))
    sender.close()


def test_another_process_reads_a_parcel_and_nothing_is_left() -> None:
    (parcel,), sender, receiver = packed(some_weights(1))
    child = os.fork()
    if not child:
        ((_, tensor),) = receiver.take(parcel)
        os._exit(0 if tensor.tolist() == some_weights(1)[0][1].tolist() else 1)
    assert os.waitpid(child, 0)[1] == 0
    sender.close()
    assert not Path(parcel.where["path"]).exists()
    assert not [path for path in Path("/dev/shm").iterdir() if "postgrad-weights" in path.name]


def worked_checksum(payload: bytes) -> str:
    """By the definition, with Python's integers."""
    words = np.frombuffer(payload, np.int64).tolist()
    rows = len(words) // 1024
    table = [words[row * 1024 : (row + 1) * 1024] for row in range(rows)]

    def weighted(values: list[int], factor: int) -> int:
        return sum(v * (2 * factor * n + factor) for n, v in enumerate(values))

    digest = len(words)
    columns = [sum(column) for column in zip(*table, strict=True)] or [0] * 1024
    for value in (
        weighted([sum(row) for row in table], 3),
        weighted(columns, 5),
        weighted(words[rows * 1024 :], 7),
    ):
        digest = (digest * FACTOR + value) % MODULUS
    return f"{digest:016x}"


@pytest.mark.parametrize("length", [8, 64, 8192, 8200, 3 * 8192 + 64])
def test_the_checksum_is_the_one_that_is_defined(length: int) -> None:
    payload = np.random.default_rng(length).integers(0, 256, length, np.uint8)
    assert checksum(torch.from_numpy(payload)) == worked_checksum(payload.tobytes())


def test_the_checksum_sees_words_that_change_places() -> None:
    payload = torch.from_numpy(np.random.default_rng(0).integers(0, 256, 4 * 8192, np.uint8))
    words = payload.view(torch.int64)
    seen = {checksum(payload)}
    for index, other in itertools.combinations([0, 1, 1024, 1025, 2048], 2):
        swapped = words.clone()
        swapped[[index, other]] = swapped[[other, index]]
        seen.add(checksum(swapped.view(torch.uint8)))
    assert len(seen) == 11


def test_a_rank_that_packs_nothing_iterates_over_all_weights() -> None:
    gathered: list[str] = []

    def weights() -> Any:
        for name, tensor in some_weights():
            gathered.append(name)
            yield name, tensor

    sender = Sender(weights(), torch.float32, None, BUCKET)
    assert sender.next() is None
    assert gathered == [name for name, _ in some_weights()]
