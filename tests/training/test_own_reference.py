"""Preferences against a reference with a model of its own: where it is loaded, what its logprobs
are kept under, and that it is freed before the first update.
"""

import gc
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from helpers.fake_ranks import FakeGroup, fake_ranks
from helpers.runs import lines, tensors
from helpers.tiny_runs import MakeRecipe
from postgrad.checkpoint.state import RunState
from postgrad.fleet import engines, loading
from postgrad.fleet.local import LocalFleet
from postgrad.learner.policy import Policy
from postgrad.learner.reference import ReferenceLogprobs
from postgrad.observe.console import Console
from postgrad.recipe.recipe import Recipe
from postgrad.training.pairs import PreferenceJob
from postgrad.training.start import train

__all__ = ["fake_ranks"]

Models = Callable[[int], str]
RANKS = {"learner": {"ranks": 2, "sharding": "zero3"}, "cluster": {"type": "ray"}}


@pytest.fixture
def make_preference(make_recipe: MakeRecipe, models: Models) -> MakeRecipe:
    """make_preference("run", **changes): the policy starts from one model, KL from another."""

    def make(run: str, **changes: Any) -> Recipe:
        changes = {
            "model": {"path": models(1), "init": None},
            "reference": {"model": {"path": models(2)}},
            **changes,
        }
        return make_recipe("preference", run, **changes)

    return make


def loss_of(recipe: Recipe) -> list[float]:
    return [line["policy/loss"] for line in lines(Path(recipe.run_dir) / "metrics.jsonl")]


@pytest.mark.slow
def test_on_ranks_the_controller_loads_no_model(
    make_preference: MakeRecipe,
    console: Console,
    models: Models,
    monkeypatch: pytest.MonkeyPatch,
    fake_ranks: list[FakeGroup],
) -> None:
    loads: list[tuple[str, bool]] = []
    load = loading.load_model

    def watched(path: str, **settings: Any) -> Any:
        loads.append((path, fake_ranks[0].working))
        return load(path, **settings)

    monkeypatch.setattr(loading, "load_model", watched)
    monkeypatch.setattr(engines, "load_model", watched)
    train(make_preference("run", **RANKS), console)
    assert loads == [(models(1), True), (models(2), True)]


@pytest.mark.slow
def test_a_run_on_a_group_of_one_rank_gives_the_bits_of_this_process(
    make_preference: MakeRecipe, console: Console, fake_ranks: list[FakeGroup]
) -> None:
    here, there = make_preference("here"), make_preference("there", cluster={"type": "ray"})
    train(here, console)
    train(there, console)
    assert len(fake_ranks) == 1
    local_tensors, ranked_tensors = (tensors(recipe.run_dir, 3) for recipe in (here, there))
    assert local_tensors.keys() == ranked_tensors.keys()
    assert all(local_tensors[name].equal(ranked_tensors[name]) for name in local_tensors)
    assert loss_of(here) == loss_of(there)


@pytest.mark.slow
def test_on_ranks_the_reference_is_gone_once_its_logprobs_are_there(
    make_preference: MakeRecipe, console: Console, fake_ranks: list[FakeGroup]
) -> None:
    train(make_preference("run", **RANKS, data={"max_len": 64, "cache": False}), console)
    (group,) = fake_ranks
    assert group.local.roles.keys() == {"policy"}
    asked = [call[0] if call[0] != "do" else call[1:3] for call in group.calls]
    release = asked.index("release")
    assert group.calls[release] == ("release", "frozen_policy")
    assert ("frozen_policy", "logprobs") in asked[:release]
    assert ("frozen_policy", "logprobs") not in asked[release:]
    assert asked.index(("policy", "update")) > release


@pytest.mark.slow
def test_in_one_process_the_reference_is_gone_before_the_first_update(
    make_preference: MakeRecipe, console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    backbones: list[Any] = []
    alive: list[bool] = []
    load, step = LocalFleet.frozen_policy, PreferenceJob.step

    def kept(fleet: LocalFleet, path: str) -> Policy:
        policy = load(fleet, path)
        backbones.append(weakref.ref(policy.backbone))
        return policy

    def looked(job: Any, state: RunState) -> Any:
        gc.collect()
        alive.extend(backbone() is not None for backbone in backbones)
        return step(job, state)

    monkeypatch.setattr(LocalFleet, "frozen_policy", kept)
    monkeypatch.setattr(PreferenceJob, "step", looked)
    train(make_preference("run", steps=1), console)
    assert alive == [False]


@pytest.mark.parametrize("kept_cache", [True, False])
def test_a_reference_that_is_the_policys_start_is_no_second_model(
    make_recipe: MakeRecipe,
    console: Console,
    models: Models,
    fake_ranks: list[FakeGroup],
    kept_cache: bool,
) -> None:
    data = {"max_len": 64, "cache": kept_cache}
    start = {"model": {"path": models(1), "init": None}, "data": data}
    train(make_recipe("preference", **start, **RANKS), console)
    (group,) = fake_ranks
    loads = [call[1] for call in group.calls if call[0] == "load_role"]
    assert loads == ["policy"]
    assert not [call for call in group.calls if call[0] == "release"]


@pytest.fixture
def cache_keys(monkeypatch: pytest.MonkeyPatch) -> list[Mapping[str, Any]]:
    """What decides the names of the files in which reference logprobs are kept, by run."""
    names: list[Mapping[str, Any]] = []
    prepare = ReferenceLogprobs.prepare

    def watched(self: ReferenceLogprobs, wanted: Any, compute: Any, folder: Any, name: Any) -> Any:
        names.append(name)
        return prepare(self, wanted, compute, folder, name)

    monkeypatch.setattr(ReferenceLogprobs, "prepare", watched)
    return names


@pytest.mark.slow
def test_the_cache_key_of_reference_logprobs_has_ranks_only_where_there_are_several(
    make_preference: MakeRecipe,
    console: Console,
    fake_ranks: list[FakeGroup],
    cache_keys: list[Mapping[str, Any]],
) -> None:
    train(make_preference("here", steps=1), console)
    train(make_preference("one rank", steps=1, cluster={"type": "ray"}), console)
    train(make_preference("two ranks", steps=1, **RANKS), console)
    here, one_rank, two_ranks = cache_keys
    assert here.keys() == {
        "model", "versions", "choices", "compiled", "mkl", "micro_train_batch_size", "attention",
        "router_dtype", "quantize",
    }  # fmt: skip
    assert one_rank == here  # the same bits: what one process kept is read by a single rank
    assert two_ranks == {**here, "ranks": [2, 1, 1, 1]}


@pytest.mark.slow
def test_the_cache_key_names_the_reference_and_not_the_policy(
    make_preference: MakeRecipe,
    console: Console,
    models: Models,
    cache_keys: list[Mapping[str, Any]],
) -> None:
    train(make_preference("one", steps=1), console)
    other = {"reference": {"model": {"path": models(3)}}}
    train(make_preference("two", steps=1, **other), console)
    first_key, second_key = cache_keys
    assert first_key["model"] == loading.frozen_hash(models(2))
    assert second_key == {**first_key, "model": loading.frozen_hash(models(3))}
