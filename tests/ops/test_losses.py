"""The clipped policy loss against hand-worked values and gradients."""

import math

import numpy as np
import torch

from postgrad.ops.losses import bounded_ratio, clipped_high, clipped_low, ppo_clip

# ratio, advantage, loss with low 0.2 and high 0.28, d loss / d ratio
CASES = np.array(
    [
        (1.0, 2.0, -2.0, -2.0),
        (1.5, 2.0, -2.56, 0.0),  # good and already likelier: stop at 1.28
        (1.5, -2.0, 3.0, 2.0),  # bad and likelier: pull back in full
        (0.5, 2.0, -1.0, -2.0),  # good and less likely: push in full
        (0.5, -2.0, 1.6, 0.0),  # bad and already less likely: stop at 0.8
        (1.25, 2.0, -2.5, -2.0),  # between 1 + low and 1 + high: not clipped
        (3.0, 0.0, 0.0, 0.0),
    ]
)


def test_the_clipped_loss_and_its_gradient_match_numbers_worked_by_hand():
    ratio = torch.tensor(CASES[:, 0], requires_grad=True)
    loss = ppo_clip(ratio, torch.tensor(CASES[:, 1]), 0.2, 0.28)
    loss.sum().backward()
    np.testing.assert_allclose(loss.detach(), CASES[:, 2], rtol=1e-14)
    np.testing.assert_allclose(ratio.grad, CASES[:, 3], rtol=1e-14)


def test_only_tokens_that_the_clip_stops_are_called_clipped():
    ratio, advantages = torch.tensor(CASES[:, 0]), torch.tensor(CASES[:, 1])
    assert clipped_high(ratio, advantages, 0.28).nonzero().flatten().tolist() == [1]
    assert clipped_low(ratio, advantages, 0.2).nonzero().flatten().tolist() == [4]


def test_the_ratio_is_the_exponential_of_the_log_difference():
    ratio = bounded_ratio(torch.tensor([-1.0, -2.0]), torch.tensor([-2.0, -1.5]))
    np.testing.assert_allclose(ratio, [math.e, math.exp(-0.5)], rtol=1e-6)


def test_a_ratio_beyond_float32_is_bounded_without_gradient():
    logprobs = torch.tensor([0.0, -200.0, -1.0], requires_grad=True)
    ratio = bounded_ratio(logprobs, torch.tensor([-200.0, 0.0, -1.0]))
    ratio.sum().backward()
    np.testing.assert_allclose(ratio.detach(), [math.exp(20), math.exp(-20), 1.0], rtol=1e-6)
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == [0.0, 0.0, 1.0]
