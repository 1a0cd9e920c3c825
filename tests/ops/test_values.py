"""The critic's loss against numbers worked by hand and a loop."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from postgrad.ops.losses import explained_variance, value_clipped, value_loss

# value, old value, return, loss with clip 0.2, d loss / d value, clipped
CASES = np.array(
    [
        (1.0, 1.0, 2.0, 0.5, -1.0, 0),  # on the old value: plain
        (1.1, 1.0, 2.0, 0.405, -0.9, 0),  # inside the range
        (1.5, 1.0, 2.0, 0.32, 0.0, 1),  # left it towards the return: 1.2 counts, no gradient
        (0.5, 1.0, 2.0, 1.125, -1.5, 0),  # left it away from the return: in full
        (3.5, 1.0, 2.0, 1.125, 1.5, 0),  # beyond the return: the larger loss is its own
        (0.5, 1.0, 0.0, 0.32, 0.0, 1),
    ]
)


def test_loss_gradient_and_what_was_clipped_match_numbers_worked_by_hand():
    values = torch.tensor(CASES[:, 0], requires_grad=True)
    old, returns = torch.tensor(CASES[:, 1]), torch.tensor(CASES[:, 2])
    loss = value_loss(values, old, returns, 0.2)
    loss.sum().backward()
    np.testing.assert_allclose(loss.detach(), CASES[:, 3], rtol=1e-12)
    np.testing.assert_allclose(values.grad, CASES[:, 4], rtol=1e-12)
    assert value_clipped(values.detach(), old, returns, 0.2).tolist() == CASES[:, 5].tolist()


def test_no_value_within_the_range_is_called_clipped_because_of_rounding():
    """0.2 + (0.05 - 0.2) is another float32 than 0.05, and so it is for many pairs of values."""
    draw = torch.Generator().manual_seed(0)
    values, old, returns = torch.randn(3, 4096, generator=draw) * 0.04
    assert float((values - old).abs().max()) < 0.25
    assert bool((old + (values - old) != values).any())
    assert not value_clipped(values, old, returns, 0.25).any()
    beyond = value_clipped(values, old, returns, 0.02)
    exact = value_clipped(values.double(), old.double(), returns.double(), 0.02)
    assert float((beyond != exact).float().mean()) < 1e-3
    assert beyond.any()


def test_without_a_range_it_is_half_the_squared_error():
    values, old, returns = (torch.tensor(CASES[:, i]) for i in range(3))
    loss = value_loss(values, old, returns, None)
    np.testing.assert_allclose(loss, 0.5 * (CASES[:, 0] - CASES[:, 2]) ** 2, rtol=1e-12)
    assert not value_clipped(values, old, returns, None).any()


PAIRS = st.lists(st.tuples(st.floats(-10, 10), st.floats(-10, 10)), min_size=2, max_size=20)


@given(pairs=PAIRS)
def test_explained_variance_is_one_less_the_share_of_variance_that_is_left(pairs):
    returns, values = np.array(pairs).T
    if returns.std() < 1e-3:
        return
    error = returns - values
    explained = explained_variance(
        error.mean(), np.square(error).mean(), returns.mean(), np.square(returns).mean()
    )
    assert explained == pytest.approx(1 - error.var() / returns.var(), rel=1e-6, abs=1e-6)


def test_equal_returns_have_no_variance_to_explain():
    assert explained_variance(0.5, 1.0, 0.1 + 0.2, (0.1 + 0.2) ** 2) == 0.0
    assert explained_variance(0.0, 0.0, 0.0, 0.0) == 0.0
