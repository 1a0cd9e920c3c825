"""Every sample of a step once, trained on or not."""

from dataclasses import replace

import numpy as np
import pytest

from postgrad.algorithms.grpo import GRPO
from postgrad.core.records import Prompt, Rollout, ScoredGroup, Sequences, Turn
from postgrad.core.rollout_batch import RolloutBatch
from postgrad.observe.samples import step_samples


def rollout(sample: int, tokens: int) -> Rollout:
    turn = Turn("policy", np.arange(tokens, dtype=np.int32), np.full(tokens, -0.5, np.float32))
    return Rollout(7, sample, (turn,), "stop", ((0, tokens),), "text")


@pytest.fixture
def group() -> ScoredGroup:
    """Three samples; a verifier failed on the second."""
    prompt = Prompt(7, np.array([5, 6], np.int32), "q", "a", "set", 3)
    scores = np.array([1.0, np.nan, 0.0])
    kept = np.array([True, False, True])
    rollouts = (rollout(0, 2), rollout(1, 3), rollout(2, 1))
    return ScoredGroup(prompt, rollouts, {"score": scores}, scores, kept)


def test_trained_samples_have_advantages_and_logprobs_and_dropped_ones_none(
    group: ScoredGroup,
) -> None:
    batch = RolloutBatch.of([group])
    credit = GRPO().credit(batch, None, None, None, {})
    learned = np.arange(len(credit.experience.sequences.tokens.values), dtype=np.float32)
    lines = list(step_samples([group], {}, 4, str, batch, credit, learned))
    assert [(line["step"], line["ticket"], line["sample"]) for line in lines] == [
        (4, 7, 0),
        (4, 7, 1),
        (4, 7, 2),
    ]
    assert [line["kept"] for line in lines] == [True, False, True]
    # rewards 1 and 0: mean 0.5, deviation 1/sqrt(2), so the advantages are +-0.7071
    assert lines[0]["advantages"] == pytest.approx([0.70710578] * 2, rel=1e-5)
    assert lines[2]["advantages"] == pytest.approx([-0.70710578], rel=1e-5)
    assert lines[0]["mask"] == [1, 1]
    assert lines[0]["turns"][0]["learner_logprobs"] == [2.0, 3.0]
    assert lines[2]["turns"][0]["learner_logprobs"] == [6.0]
    assert "advantages" not in lines[1]
    assert "learner_logprobs" not in lines[1]["turns"][0]


def test_a_line_says_what_was_taken_off_a_reward(group: ScoredGroup) -> None:
    batch = RolloutBatch.of([group])
    credit = GRPO(length_penalty={"output_tokens": 0.5}).credit(batch, None, None, None, {})
    unknown = np.full(len(credit.experience.sequences.tokens.values), np.nan, np.float32)
    lines = list(step_samples([group], {}, 4, str, batch, credit, unknown))
    # the mean reward is 0.5, and the two kept samples have 2 tokens and 1
    assert [line.get("length_penalty") for line in lines] == [0.25, None, 0.125]
    assert [line["total"] for line in lines] == [1.0, None, 0.0]  # as scored


def test_logprobs_that_were_not_computed_are_left_out(group: ScoredGroup) -> None:
    batch = RolloutBatch.of([group])
    credit = GRPO().credit(batch, None, None, None, {})
    unknown = np.full(len(credit.experience.sequences.tokens.values), np.nan, np.float32)
    lines = list(step_samples([group], {}, 4, str, batch, credit, unknown))
    assert "learner_logprobs" not in lines[0]["turns"][0]
    assert "advantages" in lines[0]


def test_values_stand_at_their_tokens_whatever_the_prompts_and_turns(group: ScoredGroup) -> None:
    """Two prompts of other lengths; an answer with a tool's reply, which bears no loss, between."""
    prompt = Prompt(9, np.array([1, 2, 3, 4], np.int32), "q", None, "set", 5)
    turns = (
        Turn("policy", np.array([11], np.int32), np.array([-0.5], np.float32)),
        Turn("environment", np.array([12, 13], np.int32), np.zeros(2, np.float32)),
        Turn("policy", np.array([14], np.int32), np.array([-0.25], np.float32)),
    )
    several = Rollout(9, 0, turns, "length", ((0, 2),), "text")
    plain = Rollout(9, 1, turns[:1], "stop", ((0, 1),), "text")
    scores = np.array([1.0, 3.0])
    other = ScoredGroup(prompt, (several, plain), {"score": scores}, scores, np.array([True, True]))
    groups = [group, other]
    batch = RolloutBatch.of(groups)
    credit = GRPO().credit(batch, None, None, None, {})
    tokens = credit.experience.sequences.tokens
    learned = np.where(
        credit.experience.sequences.loss_mask.values, -tokens.values / np.float32(16), np.nan
    ).astype(np.float32)
    lines = list(step_samples(groups, {}, 4, str, batch, credit, learned))
    assert [(line["ticket"], line["sample"]) for line in lines] == [
        (7, 0),
        (7, 1),
        (7, 2),
        (9, 0),
        (9, 1),
    ]
    line = lines[3]
    assert line["mask"] == [1, 0, 0, 1]
    assert line["advantages"] == pytest.approx([-0.70710578, 0, 0, -0.70710578], rel=1e-5)
    assert [turn["learner_logprobs"] for turn in line["turns"]] == [
        [-11 / 16],
        [0.0, 0.0],
        [-14 / 16],
    ]
    assert lines[4]["advantages"] == pytest.approx([0.70710578], rel=1e-5)


def test_rows_in_another_order_are_told_apart_by_ticket_and_sample(group: ScoredGroup) -> None:
    batch = RolloutBatch.of([group])
    credit = GRPO().credit(batch, None, None, None, {})
    sequences = credit.experience.sequences
    order = np.array([1, 0])
    turned = replace(
        credit,
        rows=credit.rows[order],
        experience=replace(
            credit.experience,
            sequences=Sequences(
                sequences.tokens.take(order), sequences.loss_mask.take(order), sequences.group
            ),
            columns={n: c.take(order) for n, c in credit.experience.columns.items()},
        ),
    )
    unknown = np.full(len(sequences.tokens.values), np.nan, np.float32)
    lines = [list(step_samples([group], {}, 4, str, batch, c, unknown)) for c in (credit, turned)]
    assert lines[0] == lines[1]
    assert lines[1][0]["advantages"] == pytest.approx([0.70710578] * 2, rel=1e-5)
