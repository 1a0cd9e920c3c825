"""Generalised advantages against recursions over plain lists, and numbers worked by hand."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from postgrad.core.ragged import Ragged
from postgrad.ops.gae import gae, token_rewards

NUMBERS = st.floats(-1e3, 1e3)
TOKENS = st.lists(  # sequences of (policy wrote it, reward, value)
    st.lists(st.tuples(st.booleans(), NUMBERS, NUMBERS), min_size=1, max_size=9),
    min_size=1,
    max_size=6,
)
FACTOR = st.sampled_from([0.0, 0.5, 0.95, 1.0])


def recursion(
    rewards: list[float], values: list[float], gamma: float, lam: float, behind: float
) -> list[float]:
    """A_t = delta_t + gamma lam A_{t+1}, as Schulman et al. write it, over policy tokens alone."""
    following, advantage, advantages = behind, 0.0, []
    for reward, value in zip(reversed(rewards), reversed(values), strict=True):
        advantage = reward + gamma * following - value + gamma * lam * advantage
        advantages.insert(0, advantage)
        following = value
    return advantages


@given(rows=TOKENS, gamma=FACTOR, lam=FACTOR, seed=st.integers(0, 99))
def test_advantages_are_those_of_a_loop_over_the_policy_s_tokens(rows, gamma, lam, seed):
    mask = Ragged.of([[token[0] for token in row] for row in rows], np.bool_)
    rewards = Ragged.of([[token[1] for token in row] for row in rows], np.float64)
    values = Ragged.of([[token[2] for token in row] for row in rows], np.float64)
    cut = np.random.default_rng(seed).random(len(rows)) < 0.5
    advantages, returns = gae(rewards, values, mask, gamma, lam, cut)
    for i, row in enumerate(rows):
        policy_tokens = [(r, v) for wrote, r, v in row if wrote]
        here = mask.row(i)
        behind = policy_tokens[-1][1] if policy_tokens and cut[i] else 0.0
        wanted = recursion(
            [r for r, _ in policy_tokens], [v for _, v in policy_tokens], gamma, lam, behind
        )
        row_advantages = mask.like(advantages).row(i)
        np.testing.assert_allclose(row_advantages[here], wanted, rtol=1e-10, atol=1e-8)
        targets = [a + v for a, (_, v) in zip(wanted, policy_tokens, strict=True)]
        np.testing.assert_allclose(mask.like(returns).row(i)[here], targets, rtol=1e-10, atol=1e-8)
        assert not row_advantages[~here].any()
        assert not mask.like(returns).row(i)[~here].any()


@given(rows=TOKENS, junk=NUMBERS)
def test_what_stands_at_other_tokens_changes_nothing(rows, junk):
    mask = Ragged.of([[token[0] for token in row] for row in rows], np.bool_)
    rewards = Ragged.of([[token[1] for token in row] for row in rows], np.float64)
    values = Ragged.of([[token[2] for token in row] for row in rows], np.float64)
    cut = np.ones(len(rows), np.bool_)
    before = gae(rewards, values, mask, 0.9, 0.8, cut)
    filled = [
        column.like(np.where(mask.values, column.values, junk)) for column in (rewards, values)
    ]
    np.testing.assert_array_equal(before, gae(*filled, mask, 0.9, 0.8, cut))


def test_numbers_worked_by_hand():
    """gamma 0.5, lam 0.5; the middle sequence has an environment token, the last one was cut."""
    mask = Ragged.of([[1, 1], [1, 0, 1], [1], [0]], np.bool_)
    rewards = mask.like(np.array([0.0, 1, 0, 9, 1, 2, 5]))
    values = mask.like(np.array([0.5, 1, 0.5, 9, 1, 4, 5]))
    cut = np.array([False, False, True, True])
    advantages, returns = gae(rewards, values, mask, 0.5, 0.5, cut)
    # delta: 0 + 0.5 - 0.5 = 0, 1 - 1 = 0; the same over the gap; 2 + 0.5 * 4 - 4 = 0
    assert advantages.tolist() == [0.0] * 7
    assert returns.tolist() == [0.5, 1, 0.5, 0, 1, 4, 0]
    advantages, _ = gae(rewards, values, mask, 1.0, 0.5, cut)
    # delta: 0 + 1 - 0.5 = 0.5, 0; and 2 + 4 - 4 = 2 at the cut one
    assert advantages.tolist() == [0.5, 0, 0.5, 0, 0, 2, 0]


def test_with_lambda_one_returns_are_discounted_sums_whatever_the_critic_says():
    mask = Ragged.of([[1, 1, 1]], np.bool_)
    rewards = mask.like(np.array([1.0, 2.0, 4.0]))
    for values in ([0.0, 0.0, 0.0], [1e6, -1e6, 3.0]):
        _, returns = gae(
            rewards, mask.like(np.array(values)), mask, 0.5, 1.0, np.zeros(1, np.bool_)
        )
        assert returns.tolist() == pytest.approx([3.0, 4.0, 4.0])


@pytest.mark.parametrize("wrong", [np.nan, np.inf])
def test_a_value_that_is_not_finite_is_an_error_where_the_policy_wrote(wrong):
    mask, cut = Ragged.of([[0, 1]], np.bool_), np.zeros(1, np.bool_)
    zeros = mask.like(np.zeros(2))
    gae(zeros, mask.like(np.array([wrong, 0.0])), mask, 1.0, 0.95, cut)
    bad = zeros.like(np.array([0, wrong]))
    for columns in ((zeros, bad), (bad, zeros)):
        with pytest.raises(ValueError, match="not finite"):
            gae(*columns, mask, 1.0, 0.95, cut)


def test_no_sequences_have_no_advantages():
    empty = Ragged.of([], np.float64)
    advantages, returns = gae(empty, empty, empty, 1.0, 0.95, np.zeros(0, np.bool_))
    assert (len(advantages), len(returns)) == (0, 0)


@given(rows=TOKENS, total=NUMBERS)
def test_token_rewards_sum_to_the_reward_less_its_charges(rows, total):
    mask = Ragged.of([[token[0] for token in row] for row in rows], np.bool_)
    turns = Ragged.of([[token[1] for token in row] for row in rows], np.float64)
    charges = Ragged.of([[token[2] for token in row] for row in rows], np.float64)
    rewards_of_tokens = token_rewards(np.full(len(rows), total), turns, charges, mask)
    assert not rewards_of_tokens.values[~mask.values].any()
    for i, row in enumerate(rows):
        charged = sum(c for wrote, _, c in row if wrote)
        wanted = total - charged if mask.row(i).any() else 0.0
        assert rewards_of_tokens.row(i).sum() == pytest.approx(wanted, rel=1e-9, abs=1e-8)


def test_a_turn_s_reward_stays_at_its_turn_and_the_rest_lies_on_the_last_policy_token():
    mask = Ragged.of([[0, 1, 1, 0, 1, 0]], np.bool_)
    turns = mask.like(np.array([0, 0, 0.5, 0, 0.25, 0.0]))
    charges = mask.like(np.array([9, 0.125, 0, 9, 1, 9.0]))
    rewards_of_tokens = token_rewards(np.array([2.75]), turns, charges, mask)
    assert rewards_of_tokens.values.tolist() == [0, -0.125, 0.5, 0, 0.25 + 2.0 - 1.0, 0]
