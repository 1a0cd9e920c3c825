"""Group advantages against hand-worked numbers, float64 loops, and their invariants."""

import math
import statistics

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from postgrad.core.ragged import Ragged
from postgrad.ops import advantages

REWARDS = np.array([1.0, 0.0, 0.0, 1.0, 2.0, 4.0])
GROUP = np.array([7, 7, 3, 7, 3, 3])  # group 7: 1, 0, 1; group 3: 0, 2, 4


def test_group_statistics_match_numbers_worked_by_hand():
    third = (2 * (1 / 3) ** 2 + (2 / 3) ** 2) / 2  # squares of group 7 over n - 1
    assert advantages.group_sizes(GROUP).tolist() == [3, 3, 3, 3, 3, 3]
    np.testing.assert_allclose(
        advantages.group_means(REWARDS, GROUP), [2 / 3, 2 / 3, 2, 2 / 3, 2, 2], rtol=1e-15
    )
    np.testing.assert_allclose(
        advantages.group_stds(REWARDS, GROUP), np.sqrt([third, third, 4, third, 4, 4]), rtol=1e-15
    )


def test_normalised_rewards_are_in_units_of_the_sample_standard_deviation_plus_eps():
    np.testing.assert_allclose(
        advantages.normalised(REWARDS, GROUP)[[2, 4, 5]],
        [-2 / (2 + 1e-6), 0.0, 2 / (2 + 1e-6)],
        rtol=1e-15,
    )


def test_the_left_out_sample_is_not_in_its_own_baseline():
    expected = [1 - 0.5, 0 - 1.0, 0 - 3.0, 1 - 0.5, 2 - 2.0, 4 - 1.0]
    np.testing.assert_allclose(
        advantages.left_one_out(REWARDS, GROUP), expected, rtol=1e-14, atol=1e-15
    )


def test_leaving_one_out_of_a_group_of_one_is_an_error():
    with pytest.raises(ValueError, match=r"groups of one: \[5\]"):
        advantages.left_one_out(np.array([1.0, 0.0, 1.0]), np.array([2, 2, 5]))


def test_a_sample_is_measured_by_the_mean_and_the_deviation_of_the_others():
    """Group 3 without one: 2, 4 (mean 3, deviation sqrt 2); 0, 4 (2, sqrt 8); 0, 2 (1, sqrt 2).
    Group 7 without its 0: 1, 1, which are equal; without a 1: 0, 1 (1/2, sqrt 1/2).
    """
    root, eps = math.sqrt(2), 1e-6
    of_seven = 0.5 / (math.sqrt(0.5) + eps)
    np.testing.assert_allclose(
        advantages.against_others(REWARDS, GROUP),
        [of_seven, -1.0, -3 / (root + eps), of_seven, 0.0, 3 / (root + eps)],
        rtol=1e-14, atol=1e-15,
    )  # fmt: skip


def test_without_a_deviation_the_others_are_the_baseline_of_rloo():
    np.testing.assert_allclose(
        advantages.against_others(REWARDS, GROUP, None),
        advantages.left_one_out(REWARDS, GROUP),
        rtol=1e-14, atol=1e-15,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("rewards", "expected"),
    [
        ([3.0], [0.0]),
        ([0.1, 0.4], [0.1 - 0.4, 0.4 - 0.1]),  # one other has no deviation
        # the others of the last are equal, though their rounded mean is not a tenth
        ([0.1, 0.1, 0.1, 0.7], [*[-0.2 / (math.sqrt(0.12) + 1e-6)] * 3, 0.6]),
    ],
)
def test_others_without_a_deviation_divide_nothing(rewards, expected):
    group = np.zeros(len(rewards), np.int64)
    scaled = advantages.against_others(np.array(rewards), group)
    np.testing.assert_allclose(scaled, expected, rtol=1e-13)
    assert np.isfinite(scaled).all()


def test_the_others_are_those_that_nemo_rl_measures_by():
    """Its formula in float64: E[R^2] - E[R]^2 of the others, times (n - 1) / (n - 2)."""
    rewards = np.random.default_rng(0).normal(size=(5, 7))
    expected = np.zeros_like(rewards)
    for group, row in enumerate(rewards):
        for place, reward in enumerate(row):
            others = np.delete(row, place)
            variance = np.mean(others**2) - np.mean(others) ** 2
            deviation = math.sqrt(variance * len(others) / (len(others) - 1))
            expected[group, place] = (reward - np.mean(others)) / (deviation + 1e-6)
    scaled = advantages.against_others(rewards.ravel(), np.repeat(np.arange(5), 7))
    np.testing.assert_allclose(scaled.reshape(5, 7), expected, rtol=1e-9)


def test_a_group_of_one_has_no_deviation():
    assert advantages.group_stds(np.array([3.0]), np.array([0])).tolist() == [0.0]


@pytest.mark.parametrize(
    "credit",
    [
        advantages.centred,
        advantages.normalised,
        advantages.left_one_out,
        advantages.against_others,
    ],
)
@given(value=st.floats(-1e6, 1e6), n=st.integers(2, 40))
def test_equal_rewards_give_exactly_zero(credit, value, n):
    assert credit(np.full(n, value), np.zeros(n, np.int64)).tolist() == [0.0] * n


def test_three_rewards_of_a_tenth_would_not_have_given_zero_by_subtraction():
    rewards = np.array([0.1, 0.1, 0.1])
    assert (rewards - rewards.sum() / 3 != 0).all()
    assert advantages.equal_groups(rewards, np.zeros(3, np.int64)).all()


grouped = st.lists(
    st.tuples(st.integers(0, 3), st.floats(-10, 10, allow_subnormal=False)), min_size=1, max_size=24
)


@given(rows=grouped)
def test_every_sample_agrees_with_a_loop_over_its_group(rows):
    group = np.array([g for g, _ in rows])
    rewards = np.array([r for _, r in rows])
    means, stds = advantages.group_means(rewards, group), advantages.group_stds(rewards, group)
    for i, g in enumerate(group):
        group_rewards = [r for h, r in rows if h == g]
        assert means[i] == pytest.approx(statistics.fmean(group_rewards), rel=1e-12, abs=1e-12)
        deviation = statistics.stdev(group_rewards) if len(group_rewards) > 1 else 0.0
        assert stds[i] == pytest.approx(deviation, rel=1e-9, abs=1e-9)


@given(rows=grouped, seed=st.integers(0, 2**16))
def test_the_order_of_samples_does_not_matter(rows, seed):
    group = np.array([g for g, _ in rows])
    rewards = np.array([r for _, r in rows])
    order = np.random.default_rng(seed).permutation(len(rows))
    np.testing.assert_allclose(
        advantages.centred(rewards, group)[order],
        advantages.centred(rewards[order], group[order]),
        atol=1e-12,
    )


@given(rows=grouped, shift=st.floats(-100, 100))
def test_a_constant_added_to_every_reward_changes_no_advantage(rows, shift):
    group = np.array([g for g, _ in rows])
    rewards = np.array([r for _, r in rows])
    np.testing.assert_allclose(
        advantages.centred(rewards + shift, group), advantages.centred(rewards, group), atol=1e-11
    )


@given(rows=grouped)
def test_advantages_of_a_group_sum_to_zero(rows):
    group = np.array([g for g, _ in rows] * 2)  # twice, so that no group has one sample
    rewards = np.array([r for _, r in rows] + [r + 1 for _, r in rows])
    for credit in (advantages.centred, advantages.left_one_out):
        sums = np.bincount(group, weights=credit(rewards, group))
        np.testing.assert_allclose(sums, 0.0, atol=1e-10)


TOKENS = st.lists(st.tuples(st.floats(-5, 5), st.floats(-5, 5)), min_size=1, max_size=6)


@given(rows=st.lists(TOKENS, min_size=1, max_size=5), total=st.floats(-10, 10))
def test_what_follows_a_token_is_a_sum_over_the_tokens_from_it_on(rows, total):
    turns = Ragged.of([[token[0] for token in row] for row in rows], np.float64)
    charges = Ragged.of([[token[1] for token in row] for row in rows], np.float64)
    totals = turns.like(advantages.to_go(np.full(len(rows), total), charges, turns))
    for i, row in enumerate(rows):
        earned = [turn - charge for turn, charge in row]
        earned[-1] += total - math.fsum(turn for turn, _ in row)
        wanted = [math.fsum(earned[t:]) for t in range(len(row))]
        np.testing.assert_allclose(totals.row(i), wanted, atol=1e-9)


def test_rewards_without_turns_and_charges_follow_every_token_exactly():
    nothing = Ragged.of([[0.0, 0.0], [0.0]], np.float64)
    totals = advantages.to_go(np.array([0.1, 0.3]), nothing, nothing)
    assert totals.tolist() == [0.1, 0.1, 0.3]
