"""What a process computes with is chosen once and can be chosen again."""

import os

import pytest
import torch

from postgrad.core.errors import RunError
from postgrad.parallel.device import Placement, apply, choose, compute_dtype


@pytest.fixture(autouse=True)
def _as_it_was() -> object:
    threads = torch.get_num_threads()
    deterministic = torch.are_deterministic_algorithms_enabled()
    yield
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(deterministic)


def test_a_stated_number_of_threads_is_taken() -> None:
    assert choose(3, True).threads == 3


def test_no_more_threads_are_chosen_than_the_process_may_use() -> None:
    assert 1 <= choose(None, True).threads <= len(os.sched_getaffinity(0))


def test_a_placement_sets_the_process_up() -> None:
    device = apply(Placement("cpu", 1, True))
    assert device == torch.device("cpu")
    assert torch.get_num_threads() == 1
    assert torch.are_deterministic_algorithms_enabled()
    apply(Placement("cpu", 2, False))
    assert torch.get_num_threads() == 2
    assert not torch.are_deterministic_algorithms_enabled()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_run_of_another_device_is_not_continued_in_silence() -> None:
    with pytest.raises(RunError, match="started on a CUDA device and none is here"):
        apply(Placement("cuda", 1, True))


def test_auto_is_bfloat16_on_cuda_and_float32_elsewhere() -> None:
    assert compute_dtype("auto", torch.device("cuda")) == torch.bfloat16
    assert compute_dtype("auto", torch.device("cpu")) == torch.float32
    assert compute_dtype("bfloat16", torch.device("cpu")) == torch.bfloat16
