"""GiGPO: turns are compared with others that answered the same state; against a loop in float64."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from postgrad.algorithms import gigpo, grpo
from postgrad.core.ragged import Ragged
from postgrad.core.records import Sequences
from postgrad.core.rollout_batch import RolloutBatch

GiGPO: Any = gigpo.GiGPO
GRPO: Any = grpo.GRPO
# (what the policy read, the tokens it wrote, the turn's reward)
Turns = list[tuple[list[int], list[int], float]]


def batch_of(
    samples: list[tuple[int, Turns, float]], *, openings: tuple[tuple[int, ...], ...] = ()
) -> RolloutBatch:
    """samples: (group, turns, the episode's reward that is of no turn)."""
    tokens = [
        [token for read, wrote, _ in turns for token in (*read, *wrote)] for _, turns, _ in samples
    ]
    mask = [
        [flag for read, wrote, _ in turns for flag in ([0] * len(read) + [1] * len(wrote))]
        for _, turns, _ in samples
    ]
    earned = [
        [
            value
            for read, wrote, reward in turns
            for value in ([0.0] * (len(read) + len(wrote) - 1) + [reward])
        ]
        for _, turns, _ in samples
    ]
    loss_mask = Ragged.of(mask, np.bool_)
    group = np.array([group for group, _, _ in samples], np.int64)
    return RolloutBatch(
        sequences=Sequences(Ragged.of(tokens, np.int32), loss_mask, group, openings=openings),
        sampled_logprobs=loss_mask.like(np.where(loss_mask.values, -1.0, 0.0).astype(np.float32)),
        turn_rewards=Ragged.of(earned, np.float64),
        rewards=np.array(
            [math.fsum([last, *(turn[2] for turn in turns)]) for _, turns, last in samples]
        ),
        ticket=group,
        sample=np.arange(len(samples)),
        truncated=np.zeros(len(samples), np.bool_),
    )


def advantages(algorithm: Any, batch: RolloutBatch) -> list[list[float]]:
    """The advantage of each turn of each sample; all tokens of a turn have the same."""
    credit = algorithm.credit(batch, None, None, None, {})
    rows: list[list[float]] = []
    for row, mask in zip(
        credit.experience.columns["advantages"], credit.experience.sequences.loss_mask, strict=True
    ):
        assert not row[~mask].any()
        starts = np.flatnonzero(np.diff(mask, prepend=False) & mask)
        ends = np.flatnonzero(np.diff(mask, append=False) & mask)
        for start, end in zip(starts, ends, strict=True):
            assert (row[start : end + 1] == row[start]).all()
        rows.append([float(row[start]) for start in starts])
    return rows


PROMPT, LEFT, RIGHT = [1, 2], [7], [8, 9]


def test_hand_worked_turns_of_one_state_are_compared_by_what_came_of_them() -> None:
    """Returns with gamma 1/2. Sample 0: 1/2, 1. Sample 1: 0, 0. Sample 2: 1/4, 1/2, 1. The state
    RIGHT has returns 1, 0 and 1/2, LEFT has 1 alone; rewards are 1, 0, 1.
    """
    batch = batch_of(
        [
            (0, [(PROMPT, [3], 0.0), (RIGHT, [4, 5], 0.0)], 1.0),
            (0, [(PROMPT, [4], 0.0), (RIGHT, [3], 0.0)], 0.0),
            (0, [(PROMPT, [3], 0.0), (RIGHT, [6], 0.0), (LEFT, [3], 0.0)], 1.0),
        ]
    )
    turns = advantages(GiGPO(std_norm=False, gamma=0.5, step_weight=2.0), batch)
    first, right = [1 / 2, 0.0, 1 / 4], [1.0, 0.0, 1 / 2]
    expected = [
        [1 / 3 + 2 * (first[0] - 1 / 4), 1 / 3 + 2 * (right[0] - 1 / 2)],
        [-2 / 3 + 2 * (first[1] - 1 / 4), -2 / 3 + 2 * (right[1] - 1 / 2)],
        [1 / 3 + 2 * (first[2] - 1 / 4), 1 / 3 + 2 * (right[2] - 1 / 2), 1 / 3],
    ]
    for got, wanted in zip(turns, expected, strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-6)
    credit = GiGPO().credit(batch, None, None, None, {})
    assert credit.metrics["groups/shared_state_fraction"] == 3 / 4


def paper(algorithm: Any, samples: list[tuple[int, Turns, float]]) -> list[list[float]]:
    def relative(value: float, values: list[float]) -> float:
        if len(set(values)) == 1:
            return 0.0
        mean = math.fsum(values) / len(values)
        spread = math.sqrt(math.fsum((v - mean) ** 2 for v in values) / (len(values) - 1))
        return (value - mean) / (spread + 1e-6 if algorithm.std_norm else 1.0)

    totals = [math.fsum([last, *(reward for *_, reward in turns)]) for _, turns, last in samples]
    returns: list[list[float]] = []
    for _, turns, last in samples:
        rewards = [reward for *_, reward in turns]
        rewards[-1] += last
        returns.append(
            [
                math.fsum(algorithm.gamma ** (k - t) * rewards[k] for k in range(t, len(rewards)))
                for t in range(len(rewards))
            ]
        )
    wanted: list[list[float]] = []
    for i, (group, turns, _) in enumerate(samples):
        siblings = [totals[j] for j, other in enumerate(samples) if other[0] == group]
        row: list[float] = []
        for t, (read, *_) in enumerate(turns):
            same = [
                returns[j][k]
                for j, (other, others, _) in enumerate(samples)
                for k in range(len(others))
                if other == group and others[k][0] == read
            ]
            row.append(
                relative(totals[i], siblings)
                + algorithm.step_weight * relative(returns[i][t], same)
            )
        wanted.append(row)
    return wanted


# Sums of these are exact, so that equal returns are equal.
amounts = st.sampled_from([0.0, 0.5, 1.0, -2.0])
later = st.lists(
    st.tuples(st.sampled_from([LEFT, RIGHT, [5]]), st.just([3, 4]), amounts), max_size=4
)
episodes = st.builds(
    lambda first, rest, last: ([(PROMPT, [3], first), *rest], last), amounts, later, amounts
)


@pytest.mark.parametrize("std_norm", [True, False])
@given(groups=st.lists(st.lists(episodes, min_size=2, max_size=4), min_size=1, max_size=3))
def test_advantages_are_the_papers(std_norm: bool, groups: Any) -> None:
    samples = [(g, *episode) for g, episodes in enumerate(groups) for episode in episodes]
    algorithm = GiGPO(std_norm=std_norm, gamma=0.5, step_weight=0.75)
    got, wanted = advantages(algorithm, batch_of(samples)), paper(algorithm, samples)
    assert [len(row) for row in got] == [len(row) for row in wanted]
    for row, expected in zip(got, wanted, strict=True):
        np.testing.assert_allclose(row, expected, rtol=2e-5, atol=2e-6)


def test_without_weight_of_steps_it_is_grpo() -> None:
    batch = batch_of([(0, [(PROMPT, [3], 0.5), (LEFT, [4], float(n))], 1.0) for n in range(3)])
    of_both = [
        algorithm.credit(batch, None, None, None, {}).experience.columns["advantages"].values
        for algorithm in (GiGPO(step_weight=0.0), GRPO(aggregation="token"))
    ]
    assert (of_both[0] == of_both[1]).all()


def test_turns_of_samples_that_bear_no_loss_are_compared_with() -> None:
    batch = batch_of([(0, [(PROMPT, [3], 0.0)], float(n)) for n in range(3)])
    batch = replace(batch, truncated=np.array([False, False, True]))
    turns = advantages(GiGPO(std_norm=False, mask_truncated_completions=True), batch)
    assert turns == [[-2.0], [0.0]]


def test_a_kl_in_the_reward_is_charged_to_the_turns_that_have_it() -> None:
    batch = batch_of([(0, [(PROMPT, [3], 0.0), (LEFT, [4], 0.0)], 1.0) for _ in range(2)])
    zero = batch.sampled_logprobs.like(np.zeros(len(batch.sampled_logprobs.values), np.float32))
    old = zero.like(zero.values.copy())
    old.values[2] = 1.0  # the first turn of the first sample is charged 0.5
    algorithm = GiGPO(std_norm=False, gamma=0.5, kl_coef=0.5, kl_in="reward", kl_estimator="k1")
    credit = algorithm.credit(batch, old, zero, None, {})
    rows = [
        row[mask]
        for row, mask in zip(
            credit.experience.columns["advantages"], batch.sequences.loss_mask, strict=True
        )
    ]
    # of episodes 1/2 and 1, of first turns 1/2 - 1/2 and 1/2, of second turns 1 and 1
    np.testing.assert_allclose(rows, [[-0.25 - 0.25, -0.25], [0.25 + 0.25, 0.25]], rtol=1e-6)
