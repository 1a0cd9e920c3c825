"""What a run's processes ask of a cluster, and what is refused before anything is loaded."""

from typing import Any

import pytest

from helpers.placed import RL
from postgrad.core.errors import UsageError
from postgrad.fleet.ranked import wants_of
from postgrad.recipe.load import parse_recipe

VLLM = {"type": "vllm", "vllm": {"tensor_parallel": 2, "engines": 2}}


def recipe(cluster: dict[str, Any], rollout: dict[str, Any]) -> Any:
    return parse_recipe({**RL, "rollout": rollout, "cluster": {"type": "ray", **cluster}})


@pytest.mark.parametrize(
    ("cluster", "rollout", "on_gpus", "on_cpus"),
    [
        ({}, {}, [1], [0]),
        ({"rollout": {"workers": 2}}, {}, [1, 1], [0, 0]),
        ({"rollout": {"workers": 2}}, VLLM, [1, 4], [0, 0]),
        ({"policy": {"colocate": "rollout"}}, {"type": "vllm"}, [1, 1], [0, 0]),
    ],
)
def test_every_process_gets_the_gpus_that_it_works_on(
    cluster: dict[str, Any], rollout: dict[str, Any], on_gpus: list[int], on_cpus: list[int]
) -> None:
    loaded = recipe(cluster, rollout)
    assert [one.gpus for one in wants_of(loaded, "cuda")] == on_gpus
    assert [one.gpus for one in wants_of(loaded, "cpu")] == on_cpus


@pytest.mark.parametrize(
    ("cluster", "rollout", "device", "told"),
    [
        ({"policy": {"gpus": 4}}, {}, "cpu", "has, and here that is a CPU"),
        ({"policy": {"gpus": 0}}, {}, "cuda", "4 processes that work on 1 GPUs each need 4"),
        ({"rollout": {"gpus": 0}}, {}, "cuda", "1 processes that work on 1 GPUs each need 1"),
        ({"rollout": {"gpus": 2}}, VLLM, "cuda", "1 processes that work on 4 GPUs each need 4"),
        ({"policy": {"colocate": "rollout"}}, VLLM, "cuda", r"rollout\.vllm wants 4"),
    ],
)
def test_a_placement_that_does_not_suit_the_device_is_refused(
    cluster: dict[str, Any], rollout: dict[str, Any], device: str, told: str
) -> None:
    with pytest.raises(UsageError, match=told):
        wants_of(recipe(cluster, rollout), device)
