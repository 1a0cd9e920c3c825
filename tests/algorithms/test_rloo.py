"""RLOO against numbers worked by hand, and against REINFORCE on whole responses."""

import numpy as np
import pytest
import torch

from postgrad.algorithms.rloo import RLOO
from postgrad.core.errors import UsageError


def test_the_baseline_is_the_mean_of_the_siblings(make_batch):
    batch = make_batch([0, 0, 0, 1, 1], [3, 0, 0, 2, 1])
    advantages = RLOO().credit(batch, None, None, None, {}).experience.columns["advantages"]
    assert [row[-1] for row in advantages] == [3.0, -1.5, -1.5, 1.0, -1.0]


def test_kl_is_charged_to_the_reward_of_the_whole_response(make_batch, over_responses):
    batch = make_batch([0, 0], [1.0, 1.0], lengths=[1, 2])
    old, ref = over_responses([[-1.0], [-1.0, -2.0]]), over_responses([[-1.5], [-3.0, -1.5]])
    credit = RLOO(kl_coef=0.1).credit(batch, old, ref, None, {})
    # k1 of the responses: 0.5 and 2 - 0.5 = 1.5; rewards 0.95 and 0.85
    advantages = credit.experience.columns["advantages"]
    np.testing.assert_allclose(advantages.row(0), [0, 0, 0.1], rtol=1e-6)
    np.testing.assert_allclose(advantages.row(1), [0, 0, -0.1, -0.1], rtol=1e-6)
    assert credit.metrics["kl/token_mean"] == pytest.approx(2.0 / 3)
    assert credit.experience.has_gradient.tolist() == [True, True]


def test_the_gradient_on_policy_is_reinforce_of_the_summed_logprobs(make_batch, make_inputs):
    batch = make_batch([0, 0], [1.0, 0.0], lengths=[2, 3])
    algorithm = RLOO(constant_length=10)
    weights = algorithm.entry_weights(batch.sequences, np.arange(2))
    mask = batch.sequences.loss_mask.values
    advantages = np.array([1.0, 1.0, -1.0, -1.0, -1.0])
    logprobs = torch.tensor([-0.1, -2.0, -0.7, -0.3, -1.1], dtype=torch.float64, requires_grad=True)
    inputs = make_inputs(logprobs, weights.values[mask], advantages=advantages)
    algorithm.policy_loss(inputs).loss.backward()
    # -(1/S) sum_i A_i d/dlogp sum_t logp_it, over the constant length
    np.testing.assert_allclose(logprobs.grad, -advantages / 2 / 10, rtol=1e-6)


def test_by_response_clips_the_product_of_the_tokens_ratios(make_batch, make_inputs):
    """Log-ratios 0.05 and 0.1 of the first response, -0.3 and 0.1 and 0.1 of the second: R is
    exp(0.15) within the bounds of 0.2, and exp(-0.1).
    """
    batch = make_batch([0, 0], [1.0, 0.0], lengths=[2, 3])
    algorithm = RLOO(constant_length=1, by_response=True)
    mask = batch.sequences.loss_mask.values
    weights = algorithm.entry_weights(batch.sequences, np.arange(2)).values[mask]
    advantages = np.array([1.0, 1.0, -1.0, -1.0, -1.0])
    old = np.array([-1.0, -2.0, -0.5, -0.5, -0.5])
    change = np.array([0.05, 0.1, -0.3, 0.1, 0.1])
    logprobs = torch.tensor(old + change, dtype=torch.float64, requires_grad=True)
    inputs = make_inputs(
        logprobs, weights, sequence=[0, 0, 1, 1, 1], advantages=advantages, old_logprobs=old
    )
    output = algorithm.policy_loss(inputs)
    output.loss.backward()
    ratios = np.exp([0.15, 0.15, -0.1, -0.1, -0.1])
    np.testing.assert_allclose(logprobs.grad, -advantages * ratios / 2, rtol=1e-6)
    assert float(output.metrics["policy/ratio"]) == pytest.approx(
        (2 * np.exp(0.15) + 3 * np.exp(-0.1)) / 5
    )

    tighter = algorithm.model_copy(update={"clip_high": 0.1, "clip_low": 0.05})
    logprobs.grad = None
    tighter.policy_loss(inputs).loss.backward()  # both responses have left the bounds
    np.testing.assert_array_equal(logprobs.grad, np.zeros(5))


def test_by_response_and_a_bound_of_each_tokens_probability_exclude_each_other():
    with pytest.raises(UsageError, match="by_response bounds the ratio of a response"):
        RLOO(by_response=True, clip_by="probability")
