"""The penalty of length relative to the group, against numbers by hand."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from postgrad.algorithms.registry import algorithm_class
from postgrad.core.errors import UsageError
from postgrad.core.ragged import Ragged
from postgrad.core.records import Sequences
from postgrad.core.rollout_batch import RolloutBatch
from postgrad.ops.advantages import relative_penalties

SHARES = {"output_tokens": 0.25, "input_tokens": 0.1, "turns": 0.1}


@pytest.fixture
def played(make_batch: Callable[..., RolloutBatch]) -> RolloutBatch:
    """Three samples of two prompt tokens. The policy wrote 2, 4 and 4 tokens; the second sample has
    one of an environment, between two turns.
    """
    batch = make_batch([0, 0, 0], [1.0, 1.0, 0.0], lengths=[2, 5, 4])
    mask = batch.sequences.loss_mask
    values = mask.values.copy()
    values[mask.offsets[1] + 4] = False
    return replace(batch, sequences=replace(batch.sequences, loss_mask=mask.like(values)))


def test_a_sample_loses_a_share_of_its_group_s_mean_reward(played: RolloutBatch) -> None:
    """The mean is 2 / 3. Tokens written are 2, 4 and 4 of at most 4, others 2, 3 and 2 of 3, turns
    1, 2 and 1 of 2.
    """
    credit = algorithm_class("dr_grpo")(length_penalty=SHARES).credit(played, None, None, None, {})
    taken = [
        2 / 3 * (0.25 * 2 / 4 + 0.1 * 2 / 3 + 0.1 * 1 / 2),
        2 / 3 * (0.25 + 0.1 + 0.1),
        2 / 3 * (0.25 + 0.1 * 2 / 3 + 0.1 * 1 / 2),
    ]
    assert credit.length_penalty.tolist() == pytest.approx(taken, rel=1e-12)
    assert credit.metrics["length_penalty/mean"] == pytest.approx(sum(taken) / 3, rel=1e-12)
    shaped = np.array([1.0, 1.0, 0.0]) - taken
    advantages = [row[-1] for row in credit.experience.columns["advantages"]]
    assert advantages == pytest.approx(list(shaped - shaped.mean()), rel=1e-6)
    assert credit.metrics["groups/reward_std"] == pytest.approx(np.sqrt(1 / 3))  # the task's own


def test_a_step_that_lost_all_its_samples_has_no_mean_penalty(make_batch: Any) -> None:
    algorithm = algorithm_class("dr_grpo")(length_penalty=SHARES)
    credit = algorithm.credit(make_batch([], [], lengths=[]), None, None, None, {})
    assert "length_penalty/mean" not in credit.metrics


def test_the_penalty_comes_before_scaling_and_clipping(played: RolloutBatch) -> None:
    shares = {"output_tokens": 0.3}  # 0.1, 0.2 and 0.2 are taken off
    algorithm = algorithm_class("rloo")(length_penalty=shares, reward_clip=0.85)
    credit = algorithm.credit(played, None, None, None, {})
    shaped = [0.85, 0.8, -0.2]
    advantages = [row[-1] for row in credit.experience.columns["advantages"]]
    assert advantages == pytest.approx(
        [shaped[0] - 0.3, shaped[1] - 0.325, shaped[2] - 0.825], rel=1e-6
    )
    running = algorithm_class("grpo")(length_penalty=shares, reward_scaling="running")
    mean = running.credit(played, None, None, None, {}).metrics["reward_scaling/mean"]
    assert mean == pytest.approx((0.9 + 0.8 - 0.2) / 3, rel=1e-12)


def test_what_was_taken_off_stays_with_the_samples_that_are_trained_on(
    played: RolloutBatch,
) -> None:
    batch = replace(played, truncated=np.array([False, True, False]))
    algorithm = algorithm_class("grpo")(
        length_penalty={"turns": 0.3}, mask_truncated_completions=True
    )
    credit = algorithm.credit(batch, None, None, None, {})
    assert credit.rows.tolist() == [0, 2]
    assert credit.length_penalty.tolist() == pytest.approx([0.1, 0.1], rel=1e-12)
    assert algorithm_class("grpo")().credit(batch, None, None, None, {}).length_penalty is None


def test_a_turn_begins_with_each_sample_and_behind_each_reply() -> None:
    rows = [[1, 1], [0, 1, 1, 0, 1], [0, 0, 1, 0, 0, 1, 0, 1]]  # with 1, 2 and 3 turns
    written = Ragged.of([np.array(row, np.bool_) for row in rows])
    algorithm: Any = algorithm_class("grpo")(length_penalty={"turns": 1.0})
    turns = written.like(np.zeros(len(written.values)))
    sequences = Sequences(turns, written, np.zeros(3, np.int64))
    shaped = algorithm.shaped_rewards(np.ones(3), turns, sequences, written, {})
    assert shaped.taken.tolist() == pytest.approx([1 / 3, 2 / 3, 1.0])
    assert shaped.rewards.tolist() == pytest.approx([2 / 3, 1 / 3, 0.0])


@given(
    rewards=st.lists(st.floats(-2.0, 2.0), min_size=1, max_size=6),
    seed=st.integers(0, 1000),
    share=st.floats(0.01, 2.0),
)
def test_the_longest_of_a_group_loses_the_share_and_no_other_more(
    rewards: list[float], seed: int, share: float
) -> None:
    amounts = np.random.default_rng(seed).integers(0, 9, len(rewards)).astype(np.float64)
    group = np.zeros(len(rewards), np.int64)
    taken = relative_penalties(np.array(rewards), {"turns": amounts}, {"turns": share}, group)
    most = share * max(0.0, sum(rewards) / len(rewards))
    assert taken.min() >= 0.0
    assert taken.max() <= most * (1 + 1e-9) + 1e-12
    if amounts.max() > 0:
        assert taken[amounts.argmax()] == pytest.approx(most, rel=1e-9, abs=1e-12)
    else:
        assert not taken.any()
    assert np.array_equal(
        relative_penalties(np.array(rewards), {"turns": 4 * amounts}, {"turns": share}, group),
        taken,
    )


@pytest.mark.parametrize("name", ["gdpo", "maxrl", "pass_at_k"])
def test_algorithms_that_read_rewards_as_right_or_apart_refuse_it(name: str) -> None:
    with pytest.raises(UsageError, match=r"length_penalty: .* does not read it"):
        algorithm_class(name)(length_penalty={"turns": 0.1})


@pytest.mark.parametrize(
    "penalty", [{"tokens": 0.1}, {"turns": 0.0}, {"turns": -0.1}, {"turns": "much"}]
)
def test_amounts_and_shares_that_are_none_are_refused(penalty: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=r"length_penalty\."):
        algorithm_class("grpo")(length_penalty=penalty)
