"""How many runs of a sweep go at once."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from postgrad.core.errors import UsageError
from postgrad.plan.hardware import parse_hardware
from postgrad.recipe.sweep import Sweep, parse_swept, sweep_of
from postgrad.tools.sweep import places
from postgrad.tools.sweep.places import places_for, with_threads

RECIPES = Path(__file__).parents[3] / "recipes"
GIB = 2**30


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Any:
    """machine("8xH100") or machine("CPU", cores=8, free=...): what this machine seems to have."""

    def pretend(name: str, cores: int = 8, free: int = 64 * GIB) -> None:
        hardware = parse_hardware(name)
        monkeypatch.setattr(places, "this_machine", lambda: hardware)
        monkeypatch.setattr(places, "usable_cores", lambda: cores)

        memory = SimpleNamespace(available=free, total=2**40)
        monkeypatch.setattr(places.psutil, "virtual_memory", lambda: memory)

    return pretend


def sweep(runs: int, *flags: str, recipe: str = "gsm8k_grpo.toml") -> Sweep:
    seeds = ",".join(map(str, range(runs)))
    return sweep_of(RECIPES / recipe, flags, parse_swept([f"seed={seeds}"]))


def test_a_run_needs_a_core(machine: Any) -> None:
    machine("CPU", cores=4)
    chosen = places_for(sweep(8).trials, None)
    assert (chosen.count, chosen.threads, chosen.reason) == (4, 1, "4 cores")
    assert places_for(sweep(3).trials, None).count == 3
    assert places_for(sweep(2).trials, None).threads == 2
    assert places_for(sweep(1).trials, None).threads is None


def test_a_run_needs_the_threads_that_its_recipe_states(machine: Any) -> None:
    machine("CPU", cores=8)
    chosen = places_for(sweep(8, "--learner.threads", "3").trials, None)
    assert (chosen.count, chosen.threads) == (2, None)


def test_a_run_needs_the_memory_of_its_plan(machine: Any) -> None:
    machine("CPU", cores=64)
    trials = sweep(16).trials
    peak = places._peak(trials[0], places.this_machine())  # pyright: ignore[reportPrivateUsage]
    machine("CPU", cores=64, free=int(3.5 * peak / places.SPARE))
    chosen = places_for(trials, None)
    assert chosen.count == 3
    assert chosen.reason == f"{peak / GIB:.1f} GiB each"
    assert chosen.threads == 21
    machine("CPU", cores=64, free=peak // 2)  # one has to try
    assert places_for(trials, None).count == 1


def test_a_person_may_say_how_many(machine: Any) -> None:
    machine("CPU", cores=2, free=GIB // 2)
    assert places_for(sweep(8).trials, 5).count == 5
    assert places_for(sweep(3).trials, 5).count == 3
    with pytest.raises(UsageError, match="--at-once 0"):
        places_for(sweep(3).trials, 0)


def test_gpus_are_divided_by_the_plan(machine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    machine("4xH100")
    chosen = places_for(sweep(8).trials, None)
    assert chosen.count == 4
    assert [chosen.environment(place) for place in range(4)] == [
        {"CUDA_VISIBLE_DEVICES": str(number)} for number in range(4)
    ]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,3")
    machine("2xH100")
    assert places_for(sweep(8).trials, None).devices == ("5", "3")
    assert places_for(sweep(1).trials, None).environment(0) == {}
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    monkeypatch.setattr(places, "_devices", lambda trial, hardware: 2)
    machine("5xH100")
    assert places_for(sweep(8).trials, None).devices == ("0,1", "2,3")


def test_runs_of_a_cluster_go_one_after_another(machine: Any) -> None:
    machine("8xH100")
    trials = sweep(2, "--cluster.type", "ray").trials
    assert places_for(trials, None).count == 1


def test_where_no_plan_can_be_made_runs_go_one_by_one(machine: Any) -> None:
    machine("CPU", cores=8)
    trials = sweep(2, "--model.path", "/no/such/model").trials
    chosen = places_for(trials, None)
    assert chosen.count == 1
    assert "the plan failed" in chosen.reason


def test_threads_are_stated_where_the_recipe_leaves_them_open() -> None:
    settled = with_threads(sweep(2, recipe="gsm8k_grpo.toml"), 3)
    assert [trial.recipes[0].learner.threads for trial in settled.trials] == [3, 3]
    stated = with_threads(sweep(2, "--learner.threads", "2"), 3)
    assert [trial.recipes[0].learner.threads for trial in stated.trials] == [2, 2]
    critic = with_threads(sweep(1, recipe="7b/ppo_lora.toml"), 3).trials[0].recipes[0].dump()
    assert (critic["learner"]["threads"], critic["critic"]["learner"]["threads"]) == (3, 3)
    pipeline = with_threads(sweep(1, recipe="quickstart"), 3).trials[0]
    assert [recipe.learner.threads for recipe in pipeline.recipes] == [3, 3]
