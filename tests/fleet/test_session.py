"""What a run's processes ask of a cluster, and what is refused before anything is loaded."""

from contextlib import closing
from typing import Any

import pytest
import torch

from helpers.placed import RL
from postgrad.cluster import connection
from postgrad.cluster.placing import Node
from postgrad.core.errors import UsageError
from postgrad.fleet.session import ClusterSession, device_of, wants_of
from postgrad.plan.advice import ranked
from postgrad.recipe.load import parse_recipe, with_overrides

VLLM = {"type": "vllm", "vllm": {"tensor_parallel": 2, "engines": 2}}


def recipe(cluster: dict[str, Any], rollout: dict[str, Any]) -> Any:
    return parse_recipe({**RL, "rollout": rollout, "cluster": {"type": "ray", **cluster}})


@pytest.mark.parametrize(
    ("cluster", "rollout", "on_gpus", "on_cpus"),
    [
        ({"rollout": {"workers": 2}}, {}, [1, 1], [0, 0]),
        ({"rollout": {"workers": 2}}, VLLM, [1, 4], [0, 0]),
        ({"policy": {"colocate": "rollout"}}, {"type": "vllm"}, [1, 1], [0, 0]),
        ({"policy": {"colocate": "rollout"}, "rollout": {"workers": 1}}, VLLM, [1, 4], [0, 0]),
    ],
)
def test_every_process_gets_the_gpus_that_it_works_on(
    cluster: dict[str, Any], rollout: dict[str, Any], on_gpus: list[int], on_cpus: list[int]
) -> None:
    loaded = recipe(cluster, rollout)
    assert [want.gpus for want in wants_of(loaded, "cuda")] == on_gpus
    assert [want.gpus for want in wants_of(loaded, "cpu")] == on_cpus


@pytest.mark.parametrize(
    ("cluster", "rollout", "device", "message"),
    [
        ({"policy": {"gpus": 4}}, {}, "cpu", "has, and here that is a CPU"),
        ({"policy": {"gpus": 0}}, {}, "cuda", "4 processes that work on 1 GPUs each need 4"),
        ({"rollout": {"gpus": 0}}, {}, "cuda", "1 processes that work on 1 GPUs each need 1"),
        ({"rollout": {"gpus": 2}}, VLLM, "cuda", "1 processes that work on 4 GPUs each need 4"),
        ({}, {}, "cuda", r"has no place\. .*policy\.colocate rollout\), .*workers 1\)$"),
        ({"policy": {"gpus": 4}}, {"type": "vllm"}, "cuda", "the rollout engine has no place"),
    ],
)
def test_a_placement_that_does_not_suit_the_device_is_refused(
    cluster: dict[str, Any], rollout: dict[str, Any], device: str, message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        wants_of(recipe(cluster, rollout), device)


def test_roles_with_processes_of_their_own_ask_for_gpus_of_their_own() -> None:
    ppo = {
        **RL,
        "algorithm": {"type": "ppo", "kl_coef": 0.05},
        "cluster": {
            "type": "ray",
            "critic": {"ranks": 2, "machines": 2},
            "reference": {"gpus": 3},
            "rollout": {"workers": 1},
        },
    }
    wants = wants_of(parse_recipe(ppo), "cuda")
    assert [(want.role, want.processes, want.gpus) for want in wants] == [
        ("policy", 4, 1),
        ("critic", 2, 1),
        ("reference", 3, 1),
        ("rollout", 1, 1),
    ]
    assert wants[1].key == "cluster.critic.ranks = 2"


def test_ranks_whose_gpus_an_engine_has_together_are_neighbours() -> None:
    shared = {"policy": {"colocate": "rollout"}, "rollout": {"workers": 2}}
    loaded = recipe(shared, {"type": "vllm", "vllm": {"tensor_parallel": 2}})
    ranks, engines = wants_of(loaded, "cuda")
    assert (ranks.processes, ranks.gpus, ranks.together) == (4, 1, 2)
    assert (engines.processes, engines.gpus, engines.inside, engines.together) == (
        2,
        2,
        "policy",
        1,
    )
    assert [want.together for want in wants_of(loaded, "cpu")] == [1, 1]
    apart = recipe({"rollout": {"workers": 2}}, VLLM)
    assert [want.together for want in wants_of(apart, "cuda")] == [1, 1]


def test_engines_that_come_later_are_no_condition_of_the_start() -> None:
    wants = wants_of(recipe({"rollout": {"workers": 8, "least": 2, "gpus": 16}}, {}), "cuda")
    (engines,) = [want for want in wants if want.role == "rollout"]
    assert (engines.processes, engines.first, engines.gpus) == (8, 2, 2)
    assert engines.key == "cluster.rollout.least = 2"


def test_on_cpus_an_engine_without_a_place_is_in_the_first_process() -> None:
    assert [want.role for want in wants_of(recipe({}, {}), "cpu")] == ["policy"]


def test_the_advice_of_a_plan_has_a_place_for_the_engine() -> None:
    for rollout in ({}, {"type": "vllm"}, VLLM):
        alone = parse_recipe({**RL, "rollout": rollout, "learner": {}})
        advised = with_overrides(alone, ranked(alone, 4, "zero2"))
        assert [want.role for want in wants_of(advised, "cuda")] == ["policy", "rollout"]


@pytest.mark.parametrize(
    ("settings", "here", "gpus", "device"),
    [
        ({"address": "head:6379"}, "cpu", [0, 8], "cuda"),
        ({"address": "head:6379"}, "cpu", [0, 0], "cpu"),
        ({"address": "head:6379"}, "cuda", None, "cuda"),
        ({"address": "head:6379", "policy": {"gpus": 4}}, "cpu", None, "cuda"),  # may still join
        ({"address": "head:6379", "policy": {"gpus": 0}}, "cpu", None, "cpu"),
        ({}, "cpu", None, "cpu"),
        ({}, "cuda", None, "cuda"),
    ],
)
def test_a_run_works_on_the_gpus_of_its_cluster_though_its_first_process_has_none(
    settings: dict[str, Any],
    here: str,
    gpus: list[int] | None,
    device: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """gpus: of the machines, None where nobody is asked."""
    asked: list[str] = []
    nodes = [Node(f"10.0.0.{number}", count, 8) for number, count in enumerate(gpus or [])]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: here == "cuda")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(connection, "start", lambda settings: not asked.append("start"))
    monkeypatch.setattr(connection, "stop", lambda: asked.append("stop"))
    monkeypatch.setattr(connection, "nodes_alive", lambda: nodes)
    with closing(ClusterSession()) as session:
        session_device = device_of(
            parse_recipe({**RL, "cluster": {"type": "ray", **settings}}), session
        )
    assert session_device == device
    assert asked == ([] if gpus is None else ["start", "stop"])


def test_a_user_who_hides_the_gpus_gets_a_run_on_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    cluster = {"type": "ray", "address": "head:6379"}
    assert device_of(parse_recipe({**RL, "cluster": cluster}), ClusterSession()) == "cpu"
