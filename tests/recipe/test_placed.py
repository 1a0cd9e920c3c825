"""Placements that no cluster has room for are refused with the recipe."""

from typing import Any

import pytest

from helpers.placed import RL
from postgrad.core.errors import UsageError
from postgrad.recipe.load import parse_recipe

REWARD = {
    "job": "reward",
    "run_dir": "run",
    "steps": 1,
    "model": {"path": "somewhere"},
    "data": {"path": "pairs.jsonl"},
    "batch": {"train_batch_size": 8},
    "learner": {"ranks": 4},
}


def parse(cluster: dict[str, Any], base: dict[str, Any] = RL) -> Any:
    return parse_recipe({**base, "cluster": {"type": "ray", **cluster}})


@pytest.mark.parametrize(
    ("cluster", "told"),
    [
        ({"policy": {"gpus": 3}}, r"cluster\.policy\.gpus: 3 beside learner\.ranks = 4"),
        ({"policy": {"machines": 3}}, r"cluster\.policy\.machines: learner\.ranks = 4 cannot"),
        ({"rollout": {"workers": 3, "machines": 2}}, r"cluster\.rollout\.machines: workers = 3"),
        ({"rollout": {"workers": 3, "gpus": 4}}, "4 GPUs cannot be divided evenly over 3 workers"),
        (
            {"policy": {"colocate": "rollout"}, "rollout": {"workers": 5}},
            r"cluster\.rollout\.workers: 5 on the devices of 4 ranks",
        ),
        (
            {"policy": {"colocate": "rollout"}, "rollout": {"gpus": 2}},
            r"cluster\.rollout\.gpus: is the ranks', whose devices",
        ),
        ({"policy": {"colocate": "critic"}}, r"cluster\.policy\.colocate"),
        ({"critic": {"gpus": 1}}, r"cluster: critic has no place of its own: it lies on the ranks"),
        ({"reference": {"gpus": 1}}, r"cluster: reference has no place of its own"),
        ({"reward_model": {}}, r"cluster: reward_model has no place of its own"),
        ({"address": "somewhere"}, r"cluster\.address"),
        ({"address": "ray://somewhere:10001"}, r"cluster\.address"),
        ({"type": "local", "rollout": {"workers": 2}}, r"cluster\.rollout: with cluster\.type"),
    ],
)
def test_an_impossible_placement_is_an_error_of_the_recipe(
    cluster: dict[str, Any], told: str
) -> None:
    with pytest.raises(UsageError, match=told):
        parse(cluster, {**RL, "learner": {"ranks": 1 if cluster.get("type") == "local" else 4}})


@pytest.mark.parametrize("cluster", [{"rollout": {}}, {"policy": {"colocate": "rollout"}}])
def test_a_job_that_samples_nothing_places_no_engine(cluster: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=r'job = "reward" samples nothing'):
        parse(cluster, REWARD)


@pytest.mark.parametrize(
    ("cluster", "workers"),
    [
        ({}, 0),
        ({"policy": {"gpus": 4, "colocate": "rollout"}}, 4),
        ({"policy": {"colocate": "rollout"}, "rollout": {"workers": 2}}, 2),
        ({"rollout": {"workers": 2, "gpus": 4, "machines": 2}, "policy": {"machines": 2}}, 2),
        ({"rollout": {}, "address": "auto"}, 1),
        ({"address": "[fe80::1]:6379"}, 0),
        ({"address": "head.cluster.local:6379"}, 0),
    ],
)
def test_a_placement_that_can_be_says_how_many_engines_there_are(
    cluster: dict[str, Any], workers: int
) -> None:
    recipe = parse(cluster)
    assert recipe.cluster.engines(recipe.learner.ranks) == workers
    assert parse_recipe(recipe.dump()) == recipe
