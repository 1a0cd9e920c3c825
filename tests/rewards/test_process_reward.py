"""A process reward model as a reward: a score for each step, mixed, credited and recorded."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from postgrad.core.errors import UsageError
from postgrad.core.records import Turn
from postgrad.core.rollout_batch import RolloutBatch
from postgrad.ops.gae import token_rewards
from postgrad.rewards.process_reward import so_far
from postgrad.rewards.scorer import Scorer
from postgrad.rewards.settings import RewardSettings, ScoringSettings
from postgrad.rollout.records_json import group_from_lines, group_to_json

END = 9  # the token that ends a step


class FakeJudge:
    """A step ends at END and at the end of a turn; its score is that of its number."""

    mean = std = None

    def __init__(self, scores: list[float], separator: str | None = "\n\n") -> None:
        self.scores, self.separator = scores, separator

    def score(self, sequences: Any, images: Any) -> np.ndarray:
        return np.zeros(len(sequences))

    def step_ends(self, ids: np.ndarray, separator: str) -> np.ndarray:
        return np.union1d(np.flatnonzero(ids == END), [len(ids) - 1])

    def score_steps(self, sequences: Any, masks: Any, images: Any) -> list[np.ndarray]:
        return [np.array(self.scores[: int(mask.sum())]) for mask in masks]


def turn(author: Any, *ids: int) -> Turn:
    return Turn(author, np.array(ids, np.int32), np.zeros(len(ids), np.float32))


def scored(make_prompt: Any, make_rollouts: Any, scores: list[float], **settings: Any) -> Any:
    (rollout,) = make_rollouts(["x"])
    turns = (turn("policy", 1, END, 2), turn("environment", END), turn("policy", 3, 4))
    rollout = replace(rollout, turns=turns, columns={"step_rewards": np.ones(6, np.float32)})
    reward = RewardSettings(type="process_reward", **settings)
    learned = {"process_reward": FakeJudge(scores)}
    with Scorer([reward], ScoringSettings(workers=1), learned=learned) as scorer:
        (group,) = scorer.score([(make_prompt(), [rollout])])
    return group


@pytest.mark.parametrize(
    ("aggregate", "wanted"),
    [
        ("min", [0.8, 0.5, 0.5]),
        ("product", [0.8, 0.4, 0.36]),
        ("mean", [0.8, 0.65, 2.2 / 3]),
        ("last", [0.8, 0.5, 0.9]),
        ("sum", [0.8, 1.3, 2.2]),
    ],
)
def test_steps_get_by_how_much_they_change_the_aggregate(
    make_prompt: Any, make_rollouts: Any, aggregate: Any, wanted: list[float]
) -> None:
    scores = [0.8, 0.5, 0.9]
    np.testing.assert_allclose(so_far(np.array(scores), aggregate), wanted)
    group = scored(
        make_prompt, make_rollouts, scores, aggregate=aggregate, credit="step", weight=2.0
    )
    assert group.rewards["process_reward"].tolist() == pytest.approx([wanted[-1]])
    assert group.total.tolist() == pytest.approx([2 * wanted[-1]])
    (rollout,) = group.rollouts
    parts = 2 * np.diff(wanted, prepend=0.0)
    # steps end at END, at the end of the first turn and at that of the last; none is the tool's
    assert rollout.columns["step_rewards"].tolist() == pytest.approx(
        [0, parts[0], parts[1], 0, 0, parts[2]], abs=1e-6
    )
    assert group.details["process_reward"][0] == {"steps": scores, "ends": [1, 2, 5]}


def test_parts_reach_the_tokens_that_gae_credits(make_prompt: Any, make_rollouts: Any) -> None:
    group = scored(make_prompt, make_rollouts, [0.8, 0.5, 0.9], aggregate="sum", credit="step")
    batch = RolloutBatch.of([group])
    mask = batch.sequences.loss_mask
    zeros = mask.like(np.zeros(len(mask.values)))
    earned = token_rewards(batch.rewards, batch.turn_rewards, zeros, mask)
    prompt = len(group.prompt.token_ids)
    assert earned.values.tolist() == pytest.approx(
        [0] * prompt + [0, 0.8, 0.5, 0, 0, 0.9], abs=1e-6
    )


def test_as_the_reward_of_the_sample_no_step_is_credited(
    make_prompt: Any, make_rollouts: Any
) -> None:
    """What a recorded sample held of other rewards goes, too."""
    group = scored(make_prompt, make_rollouts, [0.8, 0.5, 0.9])
    assert group.total.tolist() == [0.5]
    assert group.rollouts[0].columns == {}
    assert not RolloutBatch.of([group]).turn_rewards.values.any()


def test_a_recorded_sample_is_read_with_the_parts_of_its_steps(
    make_prompt: Any, make_rollouts: Any
) -> None:
    group = scored(make_prompt, make_rollouts, [0.8, 0.5, 0.9], credit="step")
    again = group_from_lines(group_to_json(group, step=1, decode=str))
    ours, theirs = (RolloutBatch.of([each]).turn_rewards.values for each in (group, again))
    assert ours.tolist() == theirs.tolist()
    assert ours.any()


def test_a_step_without_a_finite_score_is_a_recorded_failure(
    make_prompt: Any, make_rollouts: Any
) -> None:
    group = scored(make_prompt, make_rollouts, [0.8, math.nan, 0.9])
    assert not group.kept[0]
    assert "which is no score" in group.failures[0].message


@pytest.mark.parametrize(
    ("settings", "separator", "message"),
    [
        ({"type": "process_reward"}, None, "scores whole answers"),
        ({"type": "reward_model"}, "\n\n", 'type = "process_reward"'),
        ({"type": "process_reward", "credit": "step", "gate": True}, "\n\n", "leave gate"),
        ({"type": "process_reward", "cpu_seconds": 9.0}, "\n\n", "in no worker"),
        (
            {"type": "process_reward", "aggregate": "max"},
            "\n\n",
            "rewards.aggregate: 'max' does not fit",
        ),
    ],
)
def test_what_fits_no_process_reward_model_is_refused(
    settings: dict[str, Any], separator: str | None, message: str
) -> None:
    learned = {settings["type"]: FakeJudge([], separator)}
    with pytest.raises(UsageError, match=message):
        Scorer([RewardSettings(**settings)], ScoringSettings(workers=1), learned=learned)
