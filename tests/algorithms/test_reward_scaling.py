"""Rewards normalised over the run and clipped, for every algorithm, against numbers by hand."""

import json
import math

import numpy as np
import pytest

from postgrad.algorithms.policy_gradient import PolicyGradient
from postgrad.algorithms.registry import ALGORITHMS, algorithm_class
from postgrad.core.errors import UsageError

READERS = {
    name: kind
    for name in ALGORITHMS
    if issubclass(kind := algorithm_class(name), PolicyGradient)
    and "reward_scaling" not in kind.unread
    and not kind().needs().teacher  # tests/algorithms/test_on_policy_distillation.py
}


@pytest.mark.parametrize("name", READERS)
def test_scaling_remembers_the_run_and_tells_what_it_did(name, make_batch, over_responses):
    algorithm = algorithm_class(name)(reward_scaling="running", reward_clip=0.5)
    batch, values = make_batch([0, 0], [1.0, -2.0]), over_responses([[0.0] * 3] * 2)
    needs = algorithm.needs()
    old, more = values if needs.teacher else None, {"teacher": values} if needs.teacher else {}
    credit = algorithm.credit(batch, old, None, values, {"kl_coef": 0.5}, **more)
    assert credit.state == {"kl_coef": 0.5, "rewards": [2, -0.5, 4.5]}
    assert credit.metrics["reward_scaling/mean"] == -0.5
    assert credit.metrics["reward_scaling/std"] == pytest.approx(math.sqrt(4.5))
    assert credit.metrics["reward_scaling/clipped"] == 1.0  # +-1.5 / 2.12 is +-0.71
    assert credit.metrics["groups/reward_std"] == pytest.approx(math.sqrt(4.5))  # the task's own
    saved = json.loads(json.dumps(credit.state))
    following = algorithm.credit(batch, old, None, values, saved, **more)
    assert following.state["rewards"] == [4, -0.5, 9.0]


def test_samples_that_are_dropped_are_in_no_mean_of_the_run(make_batch):
    algorithm = algorithm_class("grpo")(reward_scaling="running")
    credit = algorithm.credit(make_batch([0, 1, 1], [99.0, 1.0, -2.0]), None, None, None, {})
    assert credit.state == {"rewards": [2, -0.5, 4.5]}


def test_a_clip_comes_before_the_baseline(make_batch):
    batch = make_batch([0, 0], [4.0, -9.0])
    for clip, wanted in (([-1.0, 2.0], [3.0, -3.0]), (2, [4.0, -4.0]), (None, [13.0, -13.0])):
        rloo = algorithm_class("rloo")(reward_clip=clip)
        advantages = rloo.credit(batch, None, None, None, {}).experience.columns["advantages"]
        assert [row[-1] for row in advantages] == wanted


def test_a_turn_s_reward_is_divided_by_the_deviation_and_the_rest_lies_at_the_end(make_batch):
    """Rewards 3 and 1: mean 2, deviation sqrt(2). The first earned 2 of its 3 at once."""
    batch = make_batch([0, 1], [3.0, 1.0], lengths=[2, 1])
    batch.turn_rewards.values[2] = 2.0
    algorithm = algorithm_class("reinforce_pp")(reward_scaling="running", std_norm=False)
    advantages = algorithm.credit(batch, None, None, None, {}).experience.columns["advantages"]
    follows = np.array([1.0, 1.0 - 2.0, -1.0]) / math.sqrt(2)  # of each token, from it on
    np.testing.assert_allclose(advantages.values[[2, 3, 6]], follows - follows.mean(), rtol=1e-6)


@pytest.mark.parametrize("clip", [0.0, -1.0, [1.0, 1.0], [2.0, -2.0]])
def test_a_clip_that_leaves_no_room_is_refused(clip):
    with pytest.raises(UsageError, match="one number above 0"):
        algorithm_class("grpo")(reward_clip=clip)
