"""Tensors that leave their device for the host's memory, with a CPU in place of the device."""

import pytest
import torch
from torch import Tensor, nn

from postgrad.parallel.host import HostCopies, HostWeights

CPU = torch.device("cpu")
# A NaN with a payload, infinity, a negative zero and a denormal: copies of numbers might change
# them, copies of bytes do not.
BITS = torch.tensor([0x7FC00001, 0x7F800000, -0x80000000, 1], dtype=torch.int32)


def odd_floats() -> Tensor:
    return BITS.clone().view(torch.float32)


def held(*tensors: Tensor) -> int:
    """Bytes of memory behind tensors, that of several counted once."""
    return sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8, torch.int64])
def test_every_bit_comes_back_in_every_dtype(dtype: torch.dtype) -> None:
    tensor = BITS.clone().view(dtype)
    copies = HostCopies(CPU)
    copies.offload([tensor])
    assert (held(tensor), copies.nbytes) == (0, 16)
    assert torch.equal(copies.here(tensor).view(torch.int32), BITS)
    copies.reload()
    assert (held(tensor), copies.nbytes) == (16, 0)
    assert torch.equal(tensor.view(torch.int32), BITS)


def test_tensors_that_share_memory_leave_together_and_share_it_afterwards() -> None:
    """As a master weight and the weight that computes, or matrices side by side."""
    shared_tensor = torch.arange(6.0)
    first, second = nn.Parameter(shared_tensor[:2]), nn.Parameter(shared_tensor[2:].view(2, 2).t())
    copies = HostCopies(CPU)
    copies.offload([first, second, shared_tensor])
    assert copies.nbytes == 24
    assert held(shared_tensor, first, second) == 0
    assert copies.here(second).tolist() == [[2.0, 4.0], [3.0, 5.0]]  # another order in memory
    copies.reload([second])
    assert shared_tensor.tolist() == [0, 1, 2, 3, 4, 5]
    with torch.no_grad():
        first.fill_(7.0)
    assert shared_tensor.tolist() == [7, 7, 2, 3, 4, 5]


def test_what_shares_memory_with_tensors_that_stay_stays() -> None:
    weights = [torch.ones(2), torch.ones(3)]
    copies = HostCopies(CPU)
    copies.offload(weights, beside=[weights[0].view(1, 2)])
    assert [held(weight) for weight in weights] == [8, 0]


def test_tensors_that_are_away_already_keep_their_copies() -> None:
    tensor = odd_floats()
    copies = HostCopies(CPU)
    copies.offload([tensor])
    copies.offload([tensor])
    copies.reload()
    copies.reload()
    assert torch.equal(tensor.view(torch.int32), BITS)


def test_a_change_between_two_leaves_is_kept_and_host_memory_is_used_again() -> None:
    tensor = torch.zeros(4)
    copies, places = HostCopies(CPU), set[int]()
    for number in range(3):
        copies.offload([tensor])
        assert copies.here(tensor).tolist() == [number] * 4
        places.add(copies.here(tensor).data_ptr())
        copies.reload()
        tensor += 1
    assert len(places) == 1


def test_a_tensor_of_another_device_and_one_without_numbers_stay() -> None:
    elsewhere, empty = torch.zeros(2, device="meta"), torch.zeros(0)
    copies = HostCopies(CPU)
    copies.offload([elsewhere, empty])
    assert copies.nbytes == 0
    assert copies.here(empty) is empty


def test_frozen_weights_are_copied_to_the_host_once() -> None:
    lm = nn.Linear(2, 2)
    before = lm.weight.detach().clone()
    weights = HostWeights(lm)
    assert held(*lm.parameters()) == 0
    with weights:
        assert torch.equal(lm.weight, before)
        lm.weight.data.zero_()  # which nobody does: it is not seen by the copy
    with weights:
        assert torch.equal(lm.weight, before)
    assert held(*lm.parameters()) == 0
