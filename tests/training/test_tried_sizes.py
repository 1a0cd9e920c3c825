"""Which sizes a run tries where its models and its engine are, and that it tries them there."""

from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from helpers.fake_ranks import FakeGroup, fake_ranks
from helpers.runs import lines
from helpers.tiny_runs import MakeRecipe
from postgrad.core.errors import RunError, UsageError
from postgrad.fleet.choices import choose
from postgrad.fleet.local import LocalFleet
from postgrad.fleet.ranked import RankedFleet
from postgrad.observe.console import Console
from postgrad.training import auto_sizes
from postgrad.training.auto_sizes import SLOTS, TOKENS, planned
from postgrad.training.start import train

__all__ = ["fake_ranks"]

RAY = {"type": "ray"}
WORKERS = {"cluster": {**RAY, "rollout": {"workers": 2}}}
VLLM = {"rollout": {"type": "vllm"}}  # slots = "auto" is refused there: it sizes its own engine
SEVERAL = {"cluster": RAY, "learner": {"ranks": 2, "sharding": "zero3"}}
AUTO = {"batch": {"micro_train_tokens": "auto"}, "rollout": {"slots": "auto"}}
TRIED: dict[str, tuple[str, dict[str, Any], set[str]]] = {
    "sft here": ("sft", {}, {TOKENS}),
    "rl here": ("rl", AUTO, {TOKENS, SLOTS}),
    "rl here with vllm": ("rl", AUTO | VLLM, {TOKENS}),
    "sft on one rank": ("sft", {"cluster": RAY}, set()),
    "rl on one rank": ("rl", {**AUTO, "cluster": RAY}, {SLOTS}),
    "rl on one rank with vllm": ("rl", {**AUTO, **VLLM, "cluster": RAY}, set()),
    "rl on one rank with rollout workers": ("rl", AUTO | WORKERS, set()),
    "rl on one rank that shares its device": (
        "rl", {**AUTO, "cluster": {**RAY, "policy": {"colocate": "rollout"}}}, set(),
    ),
    "sft on several ranks": ("sft", SEVERAL, set()),
    "rl on several ranks": ("rl", AUTO | SEVERAL, set()),
    "rl on several ranks with vllm": ("rl", {**AUTO, **VLLM, **SEVERAL}, set()),
}  # fmt: skip


def make(make_recipe: MakeRecipe, job: str, changes: dict[str, Any], **more: Any) -> Any:
    batch = {"micro_train_tokens": "auto"}
    return make_recipe(job, **{**changes, "batch": batch, **more})


@pytest.mark.parametrize("name", TRIED)
def test_a_size_is_tried_where_its_memory_is_in_this_process(
    name: str, make_recipe: MakeRecipe
) -> None:
    job, changes, tried = TRIED[name]
    recipe = make(make_recipe, job, changes)
    choices, untried = planned(recipe, choose(recipe, {}, measure=False), {})
    assert untried == tried
    assert choices.micro_train_tokens is not None
    assert choices.micro_train_tokens >= 48  # a row fits; planned also where nothing is tried
    assert (choices.slots is not None) == (changes.get("rollout") == AUTO["rollout"])


@pytest.mark.parametrize("name", TRIED)
def test_a_recorded_size_is_neither_planned_nor_tried(name: str, make_recipe: MakeRecipe) -> None:
    job, changes, _ = TRIED[name]
    recipe = make(make_recipe, job, changes)
    has_slots = changes.get("rollout") == AUTO["rollout"]
    recorded = {TOKENS: 480} | ({SLOTS: 3, "cache_tokens": 300} if has_slots else {})
    choices = choose(recipe, recorded, measure=False)
    assert planned(recipe, choices, recorded) == (choices, frozenset())
    assert choices.micro_train_tokens == 480


def test_a_stated_size_is_neither_planned_nor_tried(make_recipe: MakeRecipe) -> None:
    stated = {"batch": {"micro_train_tokens": 96}, "rollout": {"slots": 2}}
    recipe = make_recipe("rl", **stated)
    choices = choose(recipe, {}, measure=False)
    assert planned(recipe, choices, {}) == (choices, frozenset())
    assert (choices.micro_train_tokens, choices.slots) == (96, 2)


def test_what_is_recorded_alone_leaves_the_other_size_to_be_tried(make_recipe: MakeRecipe) -> None:
    recipe = make_recipe("rl", **AUTO)
    recorded = {TOKENS: 480}
    choices, untried = planned(recipe, choose(recipe, recorded, measure=False), recorded)
    assert untried == {SLOTS}
    assert choices.micro_train_tokens == 480


def test_without_a_plan_trials_start_from_the_largest_sizes(
    make_recipe: MakeRecipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_plan(*_: Any) -> Any:
        raise UsageError("no device is called that")

    recipe = make_recipe("rl", **AUTO)
    start = choose(recipe, {}, measure=False)
    fitting, _ = planned(recipe, start, {})
    monkeypatch.setattr(auto_sizes, "_fitting", no_plan)
    largest, untried = planned(recipe, start, {})
    assert untried == {TOKENS, SLOTS}
    assert largest.micro_train_tokens is not None
    assert fitting.micro_train_tokens is not None
    assert largest.micro_train_tokens >= fitting.micro_train_tokens


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int | None, int | None]]:
    """The slots and cache tokens of the run's choices whenever a fleet was asked for an engine.
    There is memory for five slots.
    """
    sizes: list[tuple[int | None, int | None]] = []

    def watch(kind: Any) -> None:
        original_engine = kind.engine

        def engine(self: Any, *arguments: Any, **named: Any) -> Any:
            choices = self._context.choices
            sizes.append((choices.slots, choices.cache_tokens))
            if choices.slots is not None and choices.slots > 5:
                raise MemoryError
            return original_engine(self, *arguments, **named)

        monkeypatch.setattr(kind, "engine", engine)

    watch(LocalFleet)
    watch(RankedFleet)
    return sizes


@pytest.mark.parametrize("cluster", [{"type": "local"}, RAY], ids=["here", "one rank"])
def test_slots_are_tried_through_the_fleet_and_the_run_keeps_those_that_fit(
    make_recipe: MakeRecipe,
    console: Console,
    asked: list[tuple[int, int]],
    fake_ranks: list[FakeGroup],
    cluster: Mapping[str, Any],
) -> None:
    recipe = make_recipe("rl", steps=1, rollout={"slots": "auto"}, cluster=cluster)
    train(recipe, console)
    assert len(fake_ranks) == (cluster["type"] == "ray")
    assert asked == [(16, 16 * 64), (8, 8 * 64), (4, 4 * 64)]
    events = lines(Path(recipe.run_dir) / "events.jsonl")
    (started,) = [event for event in events if event["event"] == "started"]
    assert (started["slots"], started["cache_tokens"]) == (4, 4 * 64)
    assert [event["size"] for event in events if event["event"] == "size_lowered"] == [16, 8]
    (chosen,) = [event for event in events if event["event"] == "size_chosen"]
    assert (chosen["key"], chosen["size"]) == ("rollout.slots", 4)


def test_a_stated_cache_is_the_same_in_every_trial(
    make_recipe: MakeRecipe, console: Console, asked: list[tuple[int, int]]
) -> None:
    rollout = {"slots": "auto", "cache_tokens": 512}
    train(make_recipe("rl", steps=1, rollout=rollout), console)
    assert {places for _, places in asked} == {512}
    assert [slots for slots, _ in asked][-1] <= 5


def test_an_engine_without_room_for_one_sequence_ends_the_run_with_what_to_change(
    make_recipe: MakeRecipe, console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any, **named: Any) -> Any:
        raise MemoryError

    monkeypatch.setattr(LocalFleet, "engine", full)
    with pytest.raises(RunError, match=r"an engine for one sequence of 48 tokens.*data\.max_len"):
        train(make_recipe("rl", rollout={"slots": "auto"}), console)


def test_where_slots_are_not_tried_the_fleet_is_asked_once_for_an_engine(
    make_recipe: MakeRecipe,
) -> None:
    recipe = make(make_recipe, "rl", WORKERS, rollout={"slots": "auto"})
    choices, untried = planned(recipe, choose(recipe, {}, measure=False), {})
    calls: list[Any] = []

    def engine(path: str, stack: ExitStack, **sizes: int) -> str:
        calls.append((path, sizes))
        return "the workers'"

    run: Any = SimpleNamespace(
        recipe=recipe, choices=choices, untried=untried, fleet=SimpleNamespace(engine=engine)
    )
    with ExitStack() as stack:
        chosen_sizes: Any = auto_sizes.engine(run, "model", stack, sequences=16, max_len=48)
    assert chosen_sizes == "the workers'"
    assert calls == [("model", {"sequences": 16, "max_len": 48})]
    assert run.choices is choices
