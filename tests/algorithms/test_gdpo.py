"""GDPO: components are normalised apart; against a loop in float64 written from the paper."""

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from postgrad.algorithms import gdpo
from postgrad.core.errors import UsageError
from postgrad.recipe.recipe import RLRecipe

GDPO: Any = gdpo.GDPO
GROUP = [0, 0, 0, 1, 1, 1]
WEIGHTS = {"right": 1.0, "short": 0.5}
SECTIONS: dict[str, Any] = {
    "run_dir": "run",
    "steps": 1,
    "model": {"path": "some/model"},
    "algorithm": {"type": "gdpo"},
    "data": {"path": "rows.jsonl", "max_len": 1024},
}


def with_components(batch: Any, components: dict[str, list[float]]) -> Any:
    columns = {name: np.array(values) for name, values in components.items()}
    object.__setattr__(batch, "components", columns)
    return batch


def deviation(values: list[float]) -> float:
    mean = sum(values) / len(values)
    return math.sqrt(sum((v - mean) ** 2 for v in values) / max(1, len(values) - 1))


def paper(components: dict[str, list[float]]) -> list[float]:
    sums = [0.0] * len(GROUP)
    for name, values in components.items():
        for i, g in enumerate(GROUP):
            same = [v for v, h in zip(values, GROUP, strict=True) if h == g and not math.isnan(v)]
            if not math.isnan(values[i]) and max(same) > min(same):
                mean = sum(same) / len(same)
                sums[i] += WEIGHTS[name] * (values[i] - mean) / (deviation(same) + 1e-6)
    mean = sum(sums) / len(sums)
    spread = math.sqrt(sum((s - mean) ** 2 for s in sums) / len(sums) + 1e-8)
    return [(s - mean) / spread for s in sums]


scores = st.lists(st.sampled_from([0.0, 0.25, 1.0, 7.0, math.nan]), min_size=6, max_size=6)


@given(scores, scores)
def test_advantages_are_those_of_the_paper(right: list[float], short: list[float]) -> None:
    from postgrad.algorithms.base import CreditInputs
    from postgrad.core.ragged import Ragged
    from postgrad.core.records import Sequences

    components = {"right": right, "short": short}
    mask = Ragged.of([[0, 1]] * 6, np.bool_)
    sequences = Sequences(mask.like(np.zeros(12, np.int32)), mask, np.array(GROUP))
    zeros = mask.like(np.zeros(12))
    columns = {name: np.array(values) for name, values in components.items()}
    no = np.zeros(6, np.bool_)
    inputs = CreditInputs(sequences, np.zeros(6), zeros, zeros, no, None, no, columns, mask)
    algorithm = GDPO().for_rollout(8, WEIGHTS)
    advantages = algorithm.token_advantages(inputs).reshape(6, 2)[:, 1]
    np.testing.assert_allclose(advantages, paper(components), rtol=1e-6, atol=1e-6)


def test_a_component_of_small_size_has_a_say_that_a_sum_would_not_give_it(make_batch: Any) -> None:
    components = {"right": [10.0, 0.0, 10.0, 1.0, 1.0, 1.0], "short": [0.1, 0.0, 0.0, 0.0, 0.1, 0]}
    batch = with_components(make_batch(GROUP, [0.0] * 6), components)
    credit = GDPO().for_rollout(8, {"right": 1.0, "short": 1.0}).credit(batch, None, None, None, {})
    first, _, third, *_ = (row[-1] for row in credit.experience.columns["advantages"])
    assert first - third > 0.9


@pytest.mark.parametrize("std_norm", [True, False])
def test_each_component_may_be_measured_by_the_other_samples(
    std_norm: bool, make_batch: Any
) -> None:
    """Group 0: others 0 and 0, then 1 and 0. Of group 1 one sample has the component: it adds 0."""
    batch = with_components(
        make_batch(GROUP, [0.0] * 6), {"right": [1, 0, 0, math.nan, math.nan, 5]}
    )
    algorithm = GDPO(leave_one_out=True, std_norm=std_norm).for_rollout(8, {"right": 1.0})
    credit = algorithm.credit(batch, None, None, None, {})
    below = -0.5 / (math.sqrt(0.5) + 1e-6) if std_norm else -0.5
    sums = np.array([1.0, below, below, 0, 0, 0]) - (1 + 2 * below) / 6
    expected = sums / math.sqrt(np.mean(sums**2) + 1e-8) if std_norm else sums
    advantages = [row[-1] for row in credit.experience.columns["advantages"]]
    np.testing.assert_allclose(advantages, expected, rtol=1e-5)


def test_a_reward_without_a_weight_is_an_error(make_batch: Any) -> None:
    batch = with_components(make_batch([0, 0], [0.0, 1.0]), {"right": [0.0, 1.0]})
    with pytest.raises(ValueError, match="no weight of the rewards right"):
        GDPO().credit(batch, None, None, None, {})


def test_rewards_that_rule_over_others_are_refused() -> None:
    def recipe(**reward: Any) -> RLRecipe:
        return RLRecipe(**SECTIONS, rewards=[{"type": "gsm8k", "weight": 2.0}, reward])

    length = {"type": "regex", "pattern": "x"}
    assert recipe(**length).reward_weights == {"gsm8k": 2.0, "regex": 1.0}
    for key in ({"gate": True}, {"multiply": True}, {"on_failure": "score"}):
        with pytest.raises(UsageError, match="each"):
            recipe(**length, **key)


@pytest.mark.parametrize("weights", [{"gsm8k": 1.0}, {"gsm8k": 1.0, "regexp": 0.5}])
def test_weights_that_are_not_of_the_rewards_are_refused(weights: dict[str, float]) -> None:
    rewards = [{"type": "gsm8k"}, {"type": "regex", "pattern": "x"}]
    algorithm: dict[str, Any] = {"type": "gdpo", "component_weights": weights}
    why = r"algorithm\.component_weights: has weights of gsm8k.* the rewards are gsm8k, regex"
    with pytest.raises(UsageError, match=why):
        RLRecipe(**{**SECTIONS, "algorithm": algorithm, "rewards": rewards})
    algorithm["component_weights"] = {"gsm8k": 1.0, "regex": 0.5}
    RLRecipe(**{**SECTIONS, "algorithm": algorithm, "rewards": rewards})
