"""RLOO against numbers worked by hand, and against REINFORCE on whole responses."""

import numpy as np
import pytest
import torch

from postgrad.algorithms.rloo import RLOO


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
