"""ReMax: the greedy answer is the baseline and is not trained on."""

from typing import Any

import numpy as np
import pytest

from helpers.layouts import total, undivided
from postgrad.algorithms import remax
from postgrad.core.ragged import Ragged
from postgrad.core.records import Prompt
from postgrad.rollout.environment import SamplingSpec
from postgrad.rollout.sampling import OpenGroup
from postgrad.rollout.settings import SamplingSettings

ReMax: Any = remax.ReMax


def numbered(batch: Any, samples: list[int]) -> Any:
    object.__setattr__(batch, "sample", np.array(samples))
    return batch


def test_advantages_are_rewards_above_the_greedy_answer_s(make_batch: Any) -> None:
    batch = numbered(make_batch([0, 0, 0, 1, 1], [0.5, 1.0, 0.0, 2.0, 2.0]), [0, 1, 2, 0, 1])
    algorithm = ReMax()
    credit = algorithm.credit(batch, None, None, None, {})
    assert credit.rows.tolist() == [1, 2, 4]
    advantages = [row[-1] for row in credit.experience.columns["advantages"]]
    assert advantages == [0.5, -0.5, 0.0]
    assert credit.experience.has_gradient.tolist() == [True, True, False]
    flat = np.zeros(len(credit.experience.sequences.tokens.values))
    loss, gradient, _ = total(algorithm, credit.experience, undivided(credit.experience), flat)
    assert loss == 0.0  # -(3 * 0.5 - 3 * 0.5) / 9 loss tokens
    np.testing.assert_allclose(gradient[2:5], -0.5 / 9, rtol=1e-6)
    assert algorithm.trained_samples(40, 5) == 32


def test_a_prompt_whose_greedy_answer_was_dropped_is_dropped(make_batch: Any) -> None:
    batch = numbered(make_batch([0, 0, 1, 1], [1.0, 0.0, 1.0, 0.0]), [1, 2, 0, 1])
    credit = ReMax().credit(batch, None, None, None, {})
    assert credit.rows.tolist() == [3]
    assert credit.metrics["groups/dropped"] == 1.0


def test_kl_in_the_reward_is_charged_to_samples_and_not_to_the_baseline(
    make_batch: Any, over_responses: Any
) -> None:
    batch = numbered(make_batch([0, 0], [1.0, 1.0], [1, 2]), [0, 1])
    old, ref = over_responses([[-1.0], [-1.0, -1.0]]), over_responses([[-3.0], [-2.0, -1.5]])
    algorithm = ReMax(kl_coef=0.1, kl_in="reward", kl_estimator="k1")
    credit = algorithm.credit(batch, old, ref, None, {})
    column: Ragged = credit.experience.columns["advantages"]
    assert column.row(0)[-1] == pytest.approx(-0.1 * (1.0 + 0.5))
    assert credit.metrics["kl/token_mean"] == (1.0 + 0.5) / 2  # without the greedy token's 2
    assert credit.metrics["kl/sequence_mean"] == 1.0 + 0.5


def test_the_first_sample_alone_is_drawn_greedily() -> None:
    prompt = Prompt(3, np.array([1, 2], np.int32), "q", None, "d", 0)
    spec = SamplingSpec(3, SamplingSettings(temperature=0.7), 0, greedy=True)
    requests = list(OpenGroup(prompt, spec).requests())
    drawn = [(request.sample_ids, request.sampling.temperature) for request in requests]
    assert drawn == [((0,), 0.0), ((1, 2), 0.7)]
