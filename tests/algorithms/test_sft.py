"""Supervised fine-tuning against numbers worked by hand."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from postgrad.algorithms.sft import SFT
from postgrad.core.ragged import Ragged
from postgrad.core.records import Sequences

TOKENS = Ragged.of([[1, 2, 3], [4, 5], [6, 7]], np.int32)
MASK = Ragged.of([[0, 1, 1], [0, 1], [0, 0]], np.bool_)
SEQUENCES = Sequences(TOKENS, MASK, np.arange(3))


@pytest.mark.parametrize(
    ("aggregation", "expected"),
    [("token", (0.5 + 1.0 + 3.0) / 3), ("sequence", ((0.5 + 1.0) / 2 + 3.0) / 2)],
)
def test_the_loss_is_the_mean_nll_by_token_or_by_conversation(make_inputs, aggregation, expected):
    algorithm = SFT(aggregation=aggregation)
    weights = algorithm.entry_weights(SEQUENCES, np.arange(3)).values[MASK.values]
    logprobs = torch.tensor([-0.5, -1.0, -3.0], dtype=torch.float64, requires_grad=True)
    output = algorithm.policy_loss(make_inputs(logprobs, weights))
    output.loss.backward()
    assert float(output.loss.detach()) == pytest.approx(expected, rel=1e-6)
    np.testing.assert_allclose(logprobs.grad, -weights, rtol=1e-12)
    assert float(output.metrics["policy/nll"]) == pytest.approx(1.5)


@pytest.mark.parametrize(
    ("aggregation", "expected"),
    [
        ("token", (2 * 0.5 + 0.5 * 1.0 + 1.5 * 3.0) / 4),
        ("sequence", ((2 * 0.5 + 0.5 * 1.0) / 2.5 + 3.0) / 2),
    ],
)
def test_the_loss_is_the_weighted_mean_and_the_nll_is_not(make_inputs, aggregation, expected):
    algorithm = SFT(aggregation=aggregation)
    weighted = replace(SEQUENCES, loss_weights=MASK.like(np.float32([0, 2, 0.5, 0, 1.5, 0, 0])))
    weights = algorithm.entry_weights(weighted, np.arange(3)).values[MASK.values]
    logprobs = torch.tensor([-0.5, -1.0, -3.0], dtype=torch.float64, requires_grad=True)
    output = algorithm.policy_loss(make_inputs(logprobs, weights))
    assert float(output.loss.detach()) == pytest.approx(expected, rel=1e-6)
    assert float(output.metrics["policy/nll"]) == pytest.approx(1.5)


def test_a_conversation_without_loss_tokens_has_no_gradient():
    experience = SFT().experience(SEQUENCES)
    assert experience.has_gradient.tolist() == [True, True, False]
    assert experience.columns == {}


def test_dft_weighs_each_token_s_loss_by_its_probability(make_inputs):
    """By hand: p of 1/2 and 1/8, two tokens of weight 1/2 each; no gradient goes through p."""
    logprobs = torch.tensor([np.log(0.5), np.log(0.125)], requires_grad=True)
    output = SFT(loss="dft").policy_loss(make_inputs(logprobs, [0.5, 0.5]))
    output.loss.backward()
    expected = (0.5 * np.log(2) + 0.125 * np.log(8)) / 2
    assert float(output.loss.detach()) == pytest.approx(expected, rel=1e-12)
    assert logprobs.grad.tolist() == pytest.approx([-0.25, -0.0625], rel=1e-12)
    assert float(output.metrics["policy/nll"]) == pytest.approx((np.log(2) + np.log(8)) / 2)
