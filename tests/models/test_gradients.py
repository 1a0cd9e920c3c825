import numpy as np
import pytest
import torch
from torch import nn

from postgrad.models import linear
from postgrad.models.linear import add_narrow, adds_in_place, gradient_of


def test_only_large_weights_in_float32_that_are_trained_add_in_place() -> None:
    large = nn.Parameter(torch.empty(linear.LARGE_WEIGHT + 1))
    assert adds_in_place(large)
    assert not adds_in_place(nn.Parameter(torch.empty(linear.LARGE_WEIGHT)))
    assert not adds_in_place(
        nn.Parameter(torch.empty(linear.LARGE_WEIGHT + 1, dtype=torch.bfloat16))
    )
    assert not adds_in_place(large.detach())
    assert not adds_in_place(large * 1.0)  # computed: its gradient goes on to what it was made of


def test_a_gradient_begins_with_zeros_and_is_the_weights_own() -> None:
    weight = nn.Parameter(torch.ones(3))
    gradient_of(weight).add_(2.0)
    gradient_of(weight).add_(1.0)
    assert weight.grad is not None
    assert weight.grad.tolist() == [3.0, 3.0, 3.0]


@pytest.mark.parametrize("shape", [(33, 8), (264,), (11, 3, 8)])
def test_a_narrow_gradient_is_added_as_it_is_also_where_parts_are_added(shape, monkeypatch) -> None:
    monkeypatch.setattr(linear, "LARGE_WEIGHT", 256)  # of a matrix two rows at a time
    total, gradient = torch.randn(shape), torch.randn(shape).bfloat16()
    expected = total.numpy().astype(np.float64) + gradient.float().numpy()
    add_narrow(total, gradient)
    np.testing.assert_allclose(total.numpy(), expected, rtol=1e-6)
