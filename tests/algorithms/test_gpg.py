"""GPG held near the sampler is direct reward optimisation, against float64 NumPy."""

from typing import Any

import numpy as np
import pytest
import torch

from postgrad.algorithms.registry import algorithm_class

DRO: Any = algorithm_class("gpg")(old_logprobs="sampled", drift_coef=0.025)  # beta is 0.05


def test_gpg_with_a_drift_to_the_sampler_has_the_loss_and_gradient_of_dro(make_inputs: Any) -> None:
    """-A log p + beta / 2 (log p - log q)^2, q the sampler's probability."""
    rng = np.random.default_rng(0)
    logp, sampled = (-rng.exponential(1.0, 200) for _ in range(2))
    adv, weight = rng.normal(size=200), rng.uniform(0.1, 1.0, 200) / 200
    logprobs = torch.tensor(logp, requires_grad=True)
    inputs = make_inputs(logprobs, weight, advantages=adv, old_logprobs=sampled)
    output = DRO.policy_loss(inputs)
    output.loss.backward()
    loss = (weight * (-adv * logp + 0.5 * 0.05 * (logp - sampled) ** 2)).sum()
    assert float(output.loss.detach()) == pytest.approx(loss, rel=1e-12)
    slope = weight * (-adv + 0.05 * (logp - sampled))
    np.testing.assert_allclose(logprobs.grad, slope, rtol=1e-11, atol=1e-15)


def test_its_samples_need_no_pass_before_the_step_and_all_have_a_gradient(make_batch: Any) -> None:
    """Rewards 1 and 0 of one of two groups: R - mean times 2; the drift pulls the other group."""
    batch = make_batch([0, 0, 1, 1], [1.0, 0.0, 1.0, 1.0])
    assert not DRO.needs().old_logprobs
    assert DRO.needs().sampled_is_old
    experience = DRO.credit(batch, None, None, None, {}).experience
    old = experience.columns["old_logprobs"].values
    assert np.array_equal(old, batch.sampled_logprobs.values)
    assert experience.has_gradient.all()
    assert [row[-1] for row in experience.columns["advantages"]] == [1.0, -1.0, 0.0, 0.0]
