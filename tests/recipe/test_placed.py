"""Placements that no cluster has room for are refused with the recipe."""

from typing import Any

import pytest

from helpers.placed import PPO, RL
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
    ("cluster", "message"),
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
        (
            {"policy": {"colocate": "rollout"}, "rollout": {"workers": 2, "least": 1}},
            r"cluster\.rollout\.least: is the ranks', whose devices",
        ),
        ({"rollout": {"workers": 2, "least": 3}}, r"cluster\.rollout\.least: 3 of 2 workers"),
        ({"rollout": {"least": 0}}, r"cluster\.rollout\.least"),
        (
            {"rollout": {"workers": 4, "least": 2, "machines": 2}},
            r"cluster\.rollout\.machines: spreads workers that start together, and beside least",
        ),
        ({"policy": {"colocate": "critic"}}, r"cluster\.policy\.colocate"),
        ({"critic": {"gpus": 1}}, r"cluster\.critic: this job asks no such role"),
        ({"reward_model": {}}, r"cluster\.reward_model: this job asks no such role"),
        ({"address": "somewhere"}, r"cluster\.address"),
        ({"address": "ray://somewhere:10001"}, r"cluster\.address"),
        ({"type": "local", "rollout": {"workers": 2}}, r"cluster\.rollout: with cluster\.type"),
    ],
)
def test_an_impossible_placement_is_an_error_of_the_recipe(
    cluster: dict[str, Any], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        parse(cluster, {**RL, "learner": {"ranks": 1 if cluster.get("type") == "local" else 4}})


@pytest.mark.parametrize(
    ("ranks", "policy", "workers", "message"),
    [
        (4, {}, None, r"workers: 4 on the devices of 4 .*one on each 2 \(workers = 2\)$"),
        (4, {}, 3, r"workers: 3 on the devices of 4 ranks"),
        (
            5,
            {},
            2,
            r"learner\.ranks: 5 on 1 machines: engines of 2 devices .*a multiple of 2 on each$",
        ),
        (6, {"machines": 2}, 2, r"learner\.ranks: 6 on 2 machines"),
    ],
)
def test_engines_that_the_ranks_do_not_divide_into_are_an_error_of_the_recipe(
    ranks: int, policy: dict[str, Any], workers: int | None, message: str
) -> None:
    table = {**RL, "learner": {"ranks": ranks}}
    vllm = {"type": "vllm", "vllm": {"tensor_parallel": 2}}
    cluster = {"policy": {"colocate": "rollout", **policy}, "rollout": {"workers": workers}}
    with pytest.raises(UsageError, match=message):
        parse(cluster, {**table, "rollout": vllm})
    fewer = {**cluster, "rollout": {"workers": 2}, "policy": {"colocate": "rollout"}}
    assert parse(fewer, {**table, "learner": {"ranks": 4}, "rollout": vllm}).cluster.engines(4) == 2


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
    assert recipe.cluster.first_engines(recipe.learner.ranks) == workers
    assert parse_recipe(recipe.dump()) == recipe


def test_a_run_may_start_with_some_of_its_engines() -> None:
    cluster = parse({"rollout": {"workers": 8, "least": 2}}).cluster
    assert (cluster.engines(4), cluster.first_engines(4)) == (8, 2)


@pytest.mark.parametrize(
    ("cluster", "message"),
    [
        ({"reference": {"ranks": 2, "gpus": 3}}, r"reference\.gpus: 3 beside ranks = 2"),
        (
            {"reference": {"ranks": 2, "machines": 3}},
            r"cluster\.reference\.machines: ranks = 2 can",
        ),
        ({"reference": {"cpus": 2}}, r"reference: cpus and machines are of"),
        (
            {"reference": {"ranks": 2, "colocate": "policy"}},
            r'cluster\.reference\.ranks: is that of policy \(colocate = "policy"\)',
        ),
        (
            {"reward_model": {"colocate": "critic"}},
            r'cluster\.reward_model\.colocate: "critic" has no processes of its own',
        ),
        (
            {"reference": {"colocate": "reference"}},
            r'cluster\.reference\.colocate: "reference" has no processes of its own',
        ),
        ({"critic": {"offload": True}}, r"cluster\.critic\.offload: is for frozen"),
    ],
)
def test_an_impossible_place_of_a_role_beside_the_policy_is_an_error_of_the_recipe(
    cluster: dict[str, Any], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        parse(cluster, PPO)


def test_a_reference_that_follows_the_policy_has_no_place_of_its_own_and_never_rests() -> None:
    moving = {**PPO, "reference": {"ema_decay": 0.5}}
    with pytest.raises(UsageError, match=r"cluster\.reference: a reference that follows"):
        parse({"reference": {"ranks": 1}}, moving)
    with pytest.raises(UsageError, match=r"offload: .* this reference follows the policy"):
        parse({"reference": {"offload": True}}, moving)


def test_weights_under_a_trained_adapter_do_not_rest_unless_they_are_a_copy() -> None:
    lora = {**PPO, "model": {"path": "somewhere", "lora": {"rank": 4}}}
    with pytest.raises(UsageError, match="the weights under an adapter that is trained on them"):
        parse({"reference": {"offload": True}}, lora)
    assert parse({"reference": {"offload": True, "ranks": 1}}, lora).cluster.reference.offload
    with pytest.raises(UsageError, match=r"reward_model\.offload: these are the weights under"):
        parse({"reward_model": {"offload": True}}, lora)
    packed = {**PPO, "model": {"path": "somewhere", "lora": {"rank": 4}, "quantize": "4bit"}}
    assert parse({"reward_model": {"offload": True}}, packed).cluster.reward_model.offload


def test_a_teacher_is_placed_as_a_reference_is_unless_it_is_compared_with_its_student() -> None:
    teacher = {"teacher": {"model": {"path": "another"}}}
    graded = {**RL, **teacher, "algorithm": {"type": "on_policy_distillation"}}
    assert parse({"teacher": {"ranks": 2, "offload": True}}, graded).cluster.homes == {"teacher": 2}
    compared = {**REWARD, **teacher, "job": "sft", "algorithm": {"type": "distillation"}}
    with pytest.raises(UsageError, match=r"cluster\.teacher: distillation compares whole"):
        parse({"teacher": {"ranks": 1}}, compared)
    with pytest.raises(UsageError, match=r"cluster\.teacher\.offload: this teacher computes in"):
        parse({"teacher": {"offload": True}}, compared)
    with pytest.raises(UsageError, match=r"cluster\.teacher: this job asks no such role"):
        parse({"teacher": {"ranks": 1}})


def test_a_preference_job_without_a_reference_model_has_nothing_to_place() -> None:
    dpo = {**REWARD, "job": "preference", "algorithm": {"type": "dpo"}}
    with pytest.raises(UsageError, match=r"without a reference\.model\.path of its own"):
        parse({"reference": {"ranks": 1}}, dpo)
    dpo["reference"] = {"model": {"path": "another"}}
    assert parse({"reference": {"ranks": 1}}, dpo).cluster.homes == {"reference": 1}


def test_one_process_can_rest_a_role_and_nothing_else() -> None:
    local = {**PPO, "learner": {}}
    assert parse({"type": "local", "reference": {"offload": True}}, local).cluster.reference.offload
    with pytest.raises(UsageError, match=r"cluster\.reference: with cluster\.type"):
        parse({"type": "local", "reference": {"ranks": 2}}, local)


@pytest.mark.parametrize(
    ("cluster", "homes", "where"),
    [
        ({}, {}, ["policy", "policy", "policy"]),
        ({"critic": {"ranks": 2}}, {"critic": 2}, ["critic", "policy", "policy"]),
        (
            {"critic": {"gpus": 2}, "reward_model": {"colocate": "critic"}},
            {"critic": 2},
            ["critic", "policy", "critic"],
        ),
        (
            {"critic": {"ranks": 2}, "reference": {"ranks": 1}, "reward_model": {"ranks": 3}},
            {"critic": 2, "reference": 1, "reward_model": 3},
            ["critic", "reference", "reward_model"],
        ),
        ({"reference": {"colocate": "policy"}}, {}, ["policy", "policy", "policy"]),
    ],
)
def test_roles_have_places_in_any_grouping(
    cluster: dict[str, Any], homes: dict[str, int], where: list[str]
) -> None:
    settings = parse(cluster, PPO).cluster
    assert settings.homes == homes
    assert [settings.home(role) for role in ("critic", "reference", "reward_model")] == where


WORKERS = {"type": "ray", "rollout": {"workers": 2}}
STALE = {"max_staleness": 1}


@pytest.mark.parametrize(
    ("cluster", "rollout", "expected"),
    [
        (WORKERS, STALE, True),
        ({"type": "ray", "rollout": {}}, {"max_staleness": 3}, True),
        (WORKERS, {}, False),  # every step waits for its own weights
        ({"type": "ray", "policy": {"colocate": "rollout"}}, STALE, False),  # on its devices
        ({"type": "ray"}, STALE, False),  # in the first process
        ({"type": "local"}, STALE, False),
        (WORKERS, {**STALE, "source": "replay", "replay_path": "other"}, False),
    ],
)
def test_a_run_samples_while_it_learns_where_its_engine_is_apart_and_may_be_ahead(
    cluster: dict[str, Any], rollout: dict[str, Any], expected: bool
) -> None:
    tis = {**RL["algorithm"], "correction": "tis"}
    recipe = {
        **RL,
        "learner": {"ranks": 1},
        "algorithm": tis,
        "rollout": {**RL.get("rollout", {}), **rollout},
    }
    parsed = parse_recipe({**recipe, "cluster": cluster})
    assert parsed.samples_while_learning is expected
