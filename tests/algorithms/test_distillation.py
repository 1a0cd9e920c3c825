"""Distillation as an SFT algorithm against numbers worked by hand."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from postgrad.algorithms.distillation import Distillation


def test_the_loss_adds_divergence_and_nll_with_the_weights_of_the_update(make_inputs):
    """By hand: weights 1/4 and 1/2; divergences 0.2 and 0.6; logprobs -1 and -3."""
    logprobs = torch.tensor([-1.0, -3.0], dtype=torch.float64, requires_grad=True)
    apart = torch.tensor([0.2, 0.6], dtype=torch.float64, requires_grad=True)
    inputs = replace(make_inputs(logprobs, [0.25, 0.5]), columns={"divergence": apart})
    output = Distillation(teacher_coef=0.8, nll_coef=0.1).policy_loss(inputs)
    output.loss.backward()
    divergence, nll = 0.25 * 0.2 + 0.5 * 0.6, 0.25 * 1 + 0.5 * 3
    assert float(output.loss.detach()) == pytest.approx(0.8 * divergence + 0.1 * nll)
    np.testing.assert_allclose(apart.grad, [0.8 * 0.25, 0.8 * 0.5])
    np.testing.assert_allclose(logprobs.grad, [-0.1 * 0.25, -0.1 * 0.5])
    assert float(output.metrics["policy/divergence"]) == pytest.approx(0.4)
    assert float(output.metrics["policy/nll"]) == pytest.approx(2.0)


def test_with_the_teacher_alone_the_rows_own_tokens_have_no_pull(make_inputs):
    logprobs = torch.tensor([-1.0, -3.0], dtype=torch.float64, requires_grad=True)
    apart = torch.tensor([0.2, 0.6], dtype=torch.float64, requires_grad=True)
    inputs = replace(make_inputs(logprobs, [0.5, 0.5]), columns={"divergence": apart})
    output = Distillation().policy_loss(inputs)
    output.loss.backward()
    assert logprobs.grad is None
    assert float(output.loss.detach()) == pytest.approx(0.4)
