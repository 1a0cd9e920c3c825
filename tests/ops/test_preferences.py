"""Losses of pairs and answers at the ends of the number line, and worked by hand."""

import math

import numpy as np
import pytest
import torch

from postgrad.ops.preferences import LARGEST_MEAN, answer_sums, kto, log_exp, log_odds, logistic

FAR = [-1e4, -800.0, -30.0, -1.0, 0.0, 1.0, 30.0, 800.0, 1e4]


def softplus(x: float) -> float:
    return x + math.log1p(math.exp(-x)) if x > 0 else math.log1p(math.exp(x))


@pytest.mark.parametrize("label_smoothing", [0.0, 0.1, 0.4])
def test_the_logistic_loss_and_its_gradient_hold_far_from_zero(label_smoothing):
    x = torch.tensor(FAR, dtype=torch.float64, requires_grad=True)
    loss = logistic(x, label_smoothing)
    loss.sum().backward()
    e = label_smoothing
    wanted = [(1 - e) * softplus(-margin) + e * softplus(margin) for margin in FAR]
    np.testing.assert_allclose(loss.detach(), wanted, rtol=1e-12)
    slopes = [0.5 * (1 + math.tanh(margin / 2)) - (1 - e) for margin in FAR]  # sigmoid(x) - (1 - e)
    np.testing.assert_allclose(x.grad, slopes, rtol=1e-9, atol=1e-15)


def test_at_zero_the_loss_is_log_two_and_pushes():
    x = torch.zeros(1, requires_grad=True)
    logistic(x).sum().backward()
    assert x.grad is not None
    assert x.grad.item() == -0.5


def test_log_exp_is_the_log_sigmoid_otherwise_put():
    far = torch.tensor(FAR, dtype=torch.float64)
    zeros = torch.zeros_like(far)
    np.testing.assert_allclose(log_exp(far, zeros), logistic(far), rtol=1e-12)
    np.testing.assert_allclose(log_exp(zeros, far), logistic(-far), rtol=1e-12)
    np.testing.assert_allclose(log_exp(far, zeros)[4], math.log(2), rtol=1e-15)


def test_log_odds_are_those_of_the_probability_and_bounded_at_certainty():
    p = np.array([1e-9, 0.25, 0.5, 0.999, 1.0])
    mean = torch.tensor(np.log(p), requires_grad=True)
    odds = log_odds(mean)
    np.testing.assert_allclose(odds.detach()[:4], np.log(p[:4] / (1 - p[:4])), rtol=1e-9)
    assert odds[4].item() == pytest.approx(LARGEST_MEAN - math.log(1e-6), rel=1e-6)
    odds.sum().backward()
    assert mean.grad is not None
    np.testing.assert_allclose(mean.grad[:4], 1 / (1 - p[:4]), rtol=1e-9)
    assert mean.grad[4] == 0


def test_kto_by_hand():
    x = torch.tensor([0.0, math.log(3), math.log(3), -1e4, 1e4], dtype=torch.float64)
    good = torch.tensor([True, True, False, True, False])
    loss = kto(x, good, (2.0, 4.0))
    np.testing.assert_allclose(loss, [1.0, 0.5, 3.0, 2.0, 4.0], rtol=1e-12)


def test_answers_are_sums_over_each_sequence_s_own_entries():
    logprobs = torch.tensor([-1.0, -2.0, -4.0, -8.0])
    sequence = torch.tensor([1, 0, 1, 2])  # in any order
    sums = answer_sums(
        logprobs, {"ref_logprobs": torch.tensor([-1.0, -1.0, -1.0, -8.0])}, sequence, 4
    )
    assert sums.logprob.tolist() == [-2.0, -5.0, -8.0, 0.0]
    assert sums.log_ratio.tolist() == [-1.0, -3.0, 0.0, 0.0]
    assert sums.tokens.tolist() == [1.0, 2.0, 1.0, 1.0]  # at least 1: nothing to divide by 0
    chosen, rejected = sums.sides()
    assert chosen.logprob.tolist() == [-2.0, -8.0]
    assert rejected.log_ratio.tolist() == [-3.0, 0.0]
    assert not answer_sums(logprobs, {}, sequence, 4).log_ratio.any()
