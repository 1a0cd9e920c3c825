"""Scored groups to ragged columns: what was kept, in order, prompts without loss."""

from dataclasses import replace

import numpy as np
import pytest

from postgrad.core.errors import RunError
from postgrad.core.records import Prompt, Rollout, ScoredGroup, Turn
from postgrad.core.rollout_batch import RolloutBatch


def turn(author: str, *tokens: int) -> Turn:
    logprob = -0.5 if author == "policy" else 0.0
    return Turn(author, np.array(tokens, np.int32), np.full(len(tokens), logprob, np.float32))  # pyright: ignore[reportArgumentType]


def group(ticket: int, rollouts: list[Rollout], kept: list[bool]) -> ScoredGroup:
    prompt = Prompt(ticket, np.array([90, 91], np.int32), "q", "a", "set", ticket)
    total = np.array([float(i) if k else np.nan for i, k in enumerate(kept)])
    return ScoredGroup(prompt, tuple(rollouts), {"r": total}, total, np.array(kept))


def test_kept_samples_become_columns_over_prompt_and_response() -> None:
    single = Rollout(4, 0, (turn("policy", 1, 2),), "stop", ((0, 2),), "")
    dropped = Rollout(4, 1, (turn("policy", 3),), "stop", ((0, 1),), "")
    turns = (turn("policy", 5), turn("environment", 6, 7), turn("policy", 8))
    agent = Rollout(9, 0, turns, "length", ((0, 2),), "")
    silent = Rollout(9, 1, (turn("environment", 1),), "stop", (), "")
    batch = RolloutBatch.of(
        [group(4, [single, dropped], [True, False]), group(9, [agent, silent], [True, True])]
    )
    assert len(batch) == 2  # a sample without a token of the policy has nothing to learn from
    assert [row.tolist() for row in batch.sequences.tokens] == [
        [90, 91, 1, 2],
        [90, 91, 5, 6, 7, 8],
    ]
    assert [row.astype(int).tolist() for row in batch.sequences.loss_mask] == [
        [0, 0, 1, 1],
        [0, 0, 1, 0, 0, 1],
    ]
    assert batch.sampled_logprobs.row(1).tolist() == [0, 0, -0.5, 0, 0, -0.5]
    assert batch.sequences.group.tolist() == [0, 1]
    assert batch.ticket.tolist() == [4, 9]
    assert batch.sample.tolist() == [0, 0]
    assert batch.rewards.tolist() == [0.0, 0.0]
    assert batch.truncated.tolist() == [False, True]
    assert not batch.turn_rewards.values.any()


def test_turn_rewards_lie_where_the_environment_gave_them_weighed_as_in_the_total() -> None:
    turns = (turn("policy", 5, 3), turn("environment", 6, 7), turn("policy", 8))
    earned = {"turn_rewards": np.array([0, 0.1, 0, 0, -2], np.float32)}
    agent = Rollout(9, 0, turns, "stop", ((0, 3),), "", earned)
    plain = Rollout(9, 1, (turn("policy", 1),), "stop", ((0, 1),), "")
    groups = [group(9, [agent, plain], [True, True])]
    unweighed = RolloutBatch.of(groups)
    assert not unweighed.turn_rewards.values.any()  # the total does not hold them either
    batch = RolloutBatch.of([replace(groups[0], turn_weight=0.5)])
    tenth = float(np.float32(0.1))
    assert batch.turn_rewards.row(0).tolist() == [0, 0, 0, 0.5 * tenth, 0, 0, -1.0]
    assert batch.turn_rewards.row(1).tolist() == [0, 0, 0]
    assert batch.turn_rewards.values.dtype == np.float64


def test_nothing_kept_is_an_empty_batch() -> None:
    rollout = Rollout(4, 0, (turn("policy", 1),), "stop", ((0, 1),), "")
    batch = RolloutBatch.of([group(4, [rollout], [False])])
    assert len(batch) == 0
    assert len(batch.sequences.tokens.values) == 0


@pytest.mark.parametrize("broken", [np.nan, -np.inf, np.inf])
def test_a_sample_with_a_logprob_that_is_not_finite_is_never_learned_from(broken: float) -> None:
    logprobs = np.array([-0.5, broken], np.float32)
    turns = (Turn("policy", np.array([1, 2], np.int32), logprobs),)
    sound = Rollout(4, 0, (turn("policy", 1),), "stop", ((0, 1),), "")
    samples = [sound, Rollout(4, 1, turns, "stop", ((0, 2),), "")]
    assert len(RolloutBatch.of([group(4, samples, [True, False])])) == 1  # it was not kept
    with pytest.raises(RunError, match="ticket 4, sample 1: the sampled logprob of token 1 is"):
        RolloutBatch.of([group(4, samples, [True, True])])
