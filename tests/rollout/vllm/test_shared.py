"""Weights in memory without a name."""

import os
from pathlib import Path

import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open

from postgrad.rollout.vllm.process import buckets, shared


@given(st.lists(st.integers(1, 40), max_size=12), st.integers(4, 200))
def test_every_weight_is_in_one_bucket_in_its_order(sizes, limit):
    weights = [(str(number), torch.full((size,), number)) for number, size in enumerate(sizes)]
    found = list(buckets(weights, torch.float32, limit))
    assert [name for bucket in found for name in bucket] == [name for name, _ in weights]
    for bucket in found:
        held = sum(one.nbytes for one in bucket.values())
        assert held <= limit or len(bucket) == 1
        assert all((one == int(name)).all() for name, one in bucket.items())


def test_weights_are_converted_and_copied():
    weight = torch.arange(6.0).view(2, 3).t()
    (bucket,) = buckets([("a", weight)], torch.bfloat16)
    weight.zero_()
    assert bucket["a"].dtype == torch.bfloat16
    assert bucket["a"].tolist() == [[0, 3], [1, 4], [2, 5]]


def test_another_process_reads_them_and_nothing_is_left():
    before = set(Path("/dev/shm").iterdir())
    with shared({"a": torch.arange(4.0), "b": torch.ones(2, dtype=torch.bfloat16)}) as path:
        assert set(Path("/dev/shm").iterdir()) == before
        child = os.fork()
        if not child:
            with safe_open(path, "pt") as bucket:
                right = bucket.get_tensor("a").tolist() == [0, 1, 2, 3]
            os._exit(0 if right else 1)
        _, status = os.waitpid(child, 0)
    assert status == 0
    assert not Path(path).exists()
