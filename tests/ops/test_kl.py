"""KL estimators against hand-worked numbers and against the KL of a known distribution."""

import math

import numpy as np
import pytest
import torch

from postgrad.ops.kl import MAX_EXPONENT, adapted_coefficient, bounded, estimate, overflows

LN2 = math.log(2.0)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("k1", [LN2, -LN2, 0.0]),
        ("k2", [LN2**2 / 2, LN2**2 / 2, 0.0]),
        ("k3", [0.5 - 1 + LN2, 2.0 - 1 - LN2, 0.0]),  # exp(-ln 2) = 1/2, exp(ln 2) = 2
    ],
)
def test_estimators_match_numbers_worked_by_hand_in_numpy_and_torch(kind, expected):
    d = np.array([LN2, -LN2, 0.0])
    np.testing.assert_allclose(estimate(kind, d), expected, rtol=1e-15)
    np.testing.assert_allclose(
        estimate(kind, torch.tensor(d, dtype=torch.float32)).numpy(), expected, rtol=1e-6
    )


@pytest.mark.parametrize("size", [1e-5, 1e-4, 1e-3])
def test_k3_of_small_changes_is_no_rounding_in_float32(size):
    """By the first terms of its series; the next one is at most 1e-6 of them."""
    d = (torch.randn(4096, generator=torch.Generator().manual_seed(0)) * size).float()
    k3, wide = estimate("k3", d).double(), d.double()
    exact = wide.square() / 2 - wide**3 / 6
    assert float(k3.mean()) == pytest.approx(float(exact.mean()), rel=0.01)
    assert float(k3.min()) >= -1e-6 * float(exact.mean())


@pytest.mark.parametrize("kind", ["k1", "k3"])
def test_k1_and_k3_are_unbiased_under_the_policy(kind):
    policy = np.array([0.5, 0.3, 0.2])
    reference = np.array([0.2, 0.2, 0.6])
    d = np.log(policy / reference)
    assert policy @ estimate(kind, d) == pytest.approx(policy @ np.log(policy / reference))


def test_the_gradient_of_k2_is_the_gradient_of_the_kl():
    logits = torch.tensor([0.4, -0.1, 0.3], dtype=torch.float64, requires_grad=True)
    reference = torch.log(torch.tensor([0.2, 0.2, 0.6], dtype=torch.float64))
    logp = torch.log_softmax(logits, -1)
    probs = logp.exp().detach()
    (k2,) = torch.autograd.grad(
        (probs * estimate("k2", logp - reference)).sum(), logits, retain_graph=True
    )
    (exact,) = torch.autograd.grad((logp.exp() * (logp - reference)).sum(), logits)
    torch.testing.assert_close(k2, exact, rtol=1e-12, atol=1e-14)


def test_the_expected_gradient_of_k1_is_zero():
    logits = torch.tensor([0.4, -0.1, 0.3], dtype=torch.float64, requires_grad=True)
    logp = torch.log_softmax(logits, -1)
    (gradient,) = torch.autograd.grad((logp.exp().detach() * estimate("k1", logp)).sum(), logits)
    torch.testing.assert_close(gradient, torch.zeros(3, dtype=torch.float64), rtol=0, atol=1e-15)


def test_k3_is_bounded_where_its_exponent_overflows_and_has_no_gradient_there():
    d = torch.tensor([-500.0, -20.5, -19.5, 30.0, 500.0], requires_grad=True)
    value = estimate("k3", d)
    value.sum().backward()
    top = math.exp(MAX_EXPONENT) - 1 - MAX_EXPONENT
    expected = [top, top, math.exp(19.5) - 1 - 19.5, 29.0, 499.0]
    np.testing.assert_allclose(value.detach().numpy(), expected, rtol=1e-6)
    np.testing.assert_allclose(d.grad, [0.0, 0.0, 1 - math.exp(19.5), 1.0, 1.0], rtol=1e-6)
    assert overflows("k3", d).tolist() == [True, True, False, False, False]


def test_a_bound_of_the_kl_holds_on_both_sides_and_leaves_no_gradient_beyond():
    d = torch.tensor([-3.0, -1.0, 0.5, 12.0], dtype=torch.float64, requires_grad=True)
    value, beyond = bounded(estimate("k3", d), 10.0)  # e^3 - 4 is 16.1
    value.sum().backward()
    expected = [10.0, math.e - 2, math.exp(-0.5) - 0.5, 10.0]
    np.testing.assert_allclose(value.detach().numpy(), expected, rtol=1e-15)
    np.testing.assert_allclose(d.grad, [0.0, 1 - math.e, 1 - math.exp(-0.5), 0.0], rtol=1e-15)
    assert beyond.tolist() == [True, False, False, True]
    values, beyond = bounded(np.array([-12.0, -2.0, 12.0]), 10.0)  # k1 may be negative
    assert values.tolist() == [-10.0, -2.0, 10.0]
    assert beyond.tolist() == [True, False, True]


@pytest.mark.parametrize("kind", ["k1", "k2"])
def test_estimators_without_an_exponent_never_overflow(kind):
    assert not overflows(kind, np.array([-500.0, 500.0])).any()


@pytest.mark.parametrize(
    ("kl", "expected"),
    [
        (0.11, 0.1 * (1 + 0.1 * 512 / 10_000)),  # 10% over: the error itself
        (0.30, 0.1 * (1 + 0.2 * 512 / 10_000)),  # far over: at most 20%
        (0.00, 0.1 * (1 - 0.2 * 512 / 10_000)),
        (0.10, 0.1),
    ],
)
def test_the_coefficient_moves_by_at_most_a_fifth_of_samples_over_horizon(kl, expected):
    after = adapted_coefficient(0.1, kl, target=0.1, samples=512, horizon=10_000)
    assert after == pytest.approx(expected, rel=1e-12)
