"""GRPO against numbers worked by hand."""

import numpy as np
import pytest

from postgrad.algorithms.cispo import CISPO
from postgrad.algorithms.dapo import DAPO
from postgrad.algorithms.grpo import GRPO
from postgrad.algorithms.gspo import GSPO
from postgrad.core.errors import UsageError


def test_a_sample_is_measured_in_sample_deviations_of_its_group(make_batch):
    batch = make_batch([0, 0, 0, 1, 1], [1, 0, 0, 3, 1], lengths=[2, 1, 3, 1, 2])
    credit = GRPO().credit(batch, None, None, None, {})
    advantages = credit.experience.columns["advantages"]
    # group 0: mean 1/3, squares 4/9 + 1/9 + 1/9 over 2 = 1/3; group 1: mean 2, std sqrt(2)
    good, bad = (2 / 3) / (3**-0.5 + 1e-6), (-1 / 3) / (3**-0.5 + 1e-6)
    other = 1 / (2**0.5 + 1e-6)
    for row, (value, n) in enumerate([(good, 2), (bad, 1), (bad, 3), (other, 1), (-other, 2)]):
        np.testing.assert_allclose(advantages.row(row), [0, 0, *[value] * n], rtol=1e-7)
    assert advantages.values.dtype == np.float32
    assert credit.rows.tolist() == [0, 1, 2, 3, 4]
    assert credit.metrics["groups/reward_std"] == pytest.approx((3**-0.5 + 2**0.5) / 2)


@pytest.mark.parametrize("std_norm", [True, False])
@pytest.mark.parametrize("kind", [GRPO, DAPO, CISPO, GSPO])
def test_a_sample_may_be_left_out_of_what_it_is_measured_by(make_batch, kind, std_norm):
    batch = make_batch([0, 0, 0, 1, 1, 2], [2, 0, 4, 3, 1, 5], lengths=[1, 1, 1, 1, 1, 1])
    credit = kind(leave_one_out=True, std_norm=std_norm).credit(batch, None, None, None, {})
    advantages = credit.experience.columns["advantages"]
    # group 0: others 0 and 4, 2 and 4, 0 and 2; group 1: one other; group 2 is dropped
    deviation = 2**0.5 + 1e-6 if std_norm else 1.0
    expected = [0, -3 / deviation, 3 / deviation, 2, -2]
    np.testing.assert_allclose([row[-1] for row in advantages], expected, rtol=1e-6, atol=1e-9)
    assert credit.metrics["groups/dropped"] == 1


@pytest.mark.parametrize("kind", [GRPO, DAPO, CISPO, GSPO])
def test_advantages_may_be_in_units_of_the_deviation_of_the_step(make_batch, kind):
    """TRL's scale_rewards = "batch". Rewards 2, 0, 4, 3, 1, 2, 2 have the mean 2 and squares
    0 + 4 + 4 + 1 + 1 + 0 + 0 over 6: a deviation of sqrt(5/3). A group without variance counts.
    """
    batch = make_batch([0, 0, 0, 1, 1, 2, 2], [2, 0, 4, 3, 1, 2, 2], lengths=[1] * 7)
    deviation = (5 / 3) ** 0.5 + 1e-6
    for leave_one_out, gains in (
        (False, [0, -2, 2, 1, -1, 0, 0]),
        (True, [0, -3, 3, 2, -2, 0, 0]),
    ):
        algorithm = kind(std_norm="batch", leave_one_out=leave_one_out)
        credit = algorithm.credit(batch, None, None, None, {})
        advantages = credit.experience.columns["advantages"]
        expected = [gain / deviation for gain in gains]
        np.testing.assert_allclose([row[-1] for row in advantages], expected, rtol=1e-6)


@pytest.mark.parametrize("kind", [GRPO, DAPO, CISPO, GSPO])
def test_advantages_are_clipped_once_they_are_normalised(make_batch, kind):
    """Group 0 has the deviation 1, group 1 sqrt(2) / 10: advantages -1, 0, 1 and +-1 / sqrt(2)."""
    batch = make_batch([0, 0, 0, 1, 1], [1, 2, 3, 0.1, 0.3], lengths=[1, 1, 1, 2, 2])
    for bounds, expected, share in (
        (0.8, [-0.8, 0, 0.8, -(0.5**0.5), 0.5**0.5], 2 / 6),
        ([-0.5, 0.0], [-0.5, 0, 0, -0.5, 0], 1.0),
    ):
        credit = kind(advantage_clip=bounds).credit(batch, None, None, None, {})
        advantages = [row[-1] for row in credit.experience.columns["advantages"]]
        np.testing.assert_allclose(advantages, expected, rtol=2e-5)
        assert credit.metrics["advantages/clipped_fraction"] == pytest.approx(share)
    free = kind().credit(batch, None, None, None, {})
    assert "advantages/clipped_fraction" not in free.metrics


@pytest.mark.parametrize("bounds", [[0.5, 1.0], [0.0, 0.0], [1.0, -1.0], -2.0])
def test_bounds_of_advantages_without_0_within_are_told(bounds):
    with pytest.raises(UsageError, match="0 has to lie within, and low below high"):
        GRPO(advantage_clip=bounds)


def test_equal_rewards_of_a_step_have_no_advantage_in_units_of_its_deviation(make_batch):
    batch = make_batch([0, 0, 1, 1], [0.1] * 4, lengths=[1] * 4)
    credit = GRPO(std_norm="batch").credit(batch, None, None, None, {})
    assert [row[-1] for row in credit.experience.columns["advantages"]] == [0.0] * 4


def test_every_response_counts_the_same_whatever_its_length(make_batch):
    batch = make_batch([0, 0], [1, 0], lengths=[1, 4])
    weights = GRPO().entry_weights(batch.sequences, np.arange(2))
    np.testing.assert_allclose(weights.row(0), [0, 0, 0.5], rtol=1e-7)
    np.testing.assert_allclose(weights.row(1), [0, 0, *[0.125] * 4], rtol=1e-7)


def test_kl_stands_in_the_loss_as_k3_unless_the_recipe_says_otherwise():
    algorithm = GRPO(kl_coef=0.04)
    assert (algorithm.kl_in, algorithm.kl_estimator) == ("loss", "k3")
    assert algorithm.needs().reference
    assert not algorithm.needs().old_logprobs
