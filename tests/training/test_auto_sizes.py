"""Sizes that are "auto" are tried on the device, recorded, and change nothing else."""

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from helpers.runs import assert_same_run, lines
from helpers.tiny_runs import MakeRecipe
from postgrad.core.errors import RunError, UsageError
from postgrad.fleet.choices import choose
from postgrad.learner.backbone import Backbone
from postgrad.observe.console import Console
from postgrad.rollout.local.engine import LocalEngine
from postgrad.training import auto_sizes, estimates
from postgrad.training.auto_sizes import largest
from postgrad.training.start import resume, train

REFUSED = "[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory: 9 bytes"
AUTO = {"batch": {"micro_train_tokens": "auto"}, "rollout": {"slots": "auto"}}


def events(run_dir: str, kind: str) -> list[dict[str, Any]]:
    return [event for event in lines(Path(run_dir) / "events.jsonl") if event["event"] == kind]


def tight(monkeypatch: pytest.MonkeyPatch, tokens: int = 2**30, slots: int = 2**30) -> None:
    """An allocator that refuses more than so many tokens in a forward that learns, or slots."""
    forward, init = Backbone._run, LocalEngine.__init__

    def limited(self: Backbone, layout: Any, *rest: Any) -> Any:
        if torch.is_grad_enabled() and layout.n_tokens > tokens:
            raise RuntimeError(REFUSED)
        return forward(self, layout, *rest)

    def engine(self: LocalEngine, *args: Any, **named: Any) -> None:
        if named["slots"] > slots:
            raise MemoryError
        init(self, *args, **named)

    monkeypatch.setattr(Backbone, "_run", limited)
    monkeypatch.setattr(LocalEngine, "__init__", engine)


@given(st.integers(1, 10**6), st.integers(1, 10**6), st.integers(1, 10**6))
def test_halving_finds_what_fits_within_a_factor_of_two(start: int, floor: int, most: int) -> None:
    floor = min(floor, start)
    tried: list[int] = []

    def fits(size: int) -> bool:
        tried.append(size)
        return size <= most

    size = largest(start, floor, fits)
    assert min(tried) >= floor
    assert len(tried) <= start.bit_length() + 1
    if size is None:
        assert most < floor
        assert tried[-1] == floor
    else:
        assert size <= most
        assert size in (start, floor) or 2 * size + 1 > most


@pytest.mark.slow
def test_a_run_that_states_the_same_sizes_gives_the_same_bits(
    make_recipe: MakeRecipe, console: Console
) -> None:
    ppo = {"type": "ppo", "kl_coef": 0.05}
    automatic = make_recipe("rl", "one", algorithm=ppo, **AUTO)
    train(automatic, console)
    (started,) = events(automatic.run_dir, "started")
    sizes = {name: started[name] for name in ("slots", "cache_tokens")}
    tokens = started["micro_train_tokens"]
    assert (tokens, sizes["slots"]) == (2048, 16)
    two = make_recipe(
        "rl", "two", algorithm=ppo, batch={"micro_train_tokens": tokens}, rollout=sizes
    )
    train(two, console)
    assert_same_run(automatic, two, 3)


@pytest.mark.parametrize("job", ["sft", "rl", "reward", "preference"])
def test_what_runs_out_of_memory_is_halved_recorded_and_used_again(
    make_recipe: MakeRecipe, console: Console, monkeypatch: pytest.MonkeyPatch, job: str
) -> None:
    auto = {"batch": {"micro_train_tokens": "auto"}, "checkpoint": {"save_steps": 1}}
    recipe = make_recipe(job, steps=1, **auto)
    with monkeypatch.context() as patch:
        tight(patch, tokens=700)
        train(recipe, console)
    lowered = [event["size"] for event in events(recipe.run_dir, "size_lowered")]
    assert lowered == [2048, 1024]
    assert all(REFUSED in event["message"] for event in events(recipe.run_dir, "size_lowered"))
    monkeypatch.setattr(auto_sizes, "_try_learning", None)  # nothing is tried again
    train(make_recipe(job, steps=2, **auto), console)
    chosen = [event["micro_train_tokens"] for kind in ("started", "resumed") for event in
              events(recipe.run_dir, kind)]  # fmt: skip
    assert chosen == [512, 512]


def test_slots_are_halved_until_they_can_decode(
    make_recipe: MakeRecipe, console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    tight(monkeypatch, slots=5)
    recipe = make_recipe("rl", steps=1, rollout={"slots": "auto"})
    train(recipe, console)
    (started,) = events(recipe.run_dir, "started")
    assert (started["slots"], started["cache_tokens"]) == (4, 4 * 64)
    assert [event["size"] for event in events(recipe.run_dir, "size_lowered")] == [16, 8]


def test_where_not_even_the_longest_row_fits_the_run_ends_with_what_to_change(
    make_recipe: MakeRecipe, console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    tight(monkeypatch, tokens=47)
    recipe = make_recipe("sft", batch={"micro_train_tokens": "auto"})
    with pytest.raises(RunError, match=r"48 tokens, the longest row.*max_len"):
        train(recipe, console)
    assert events(recipe.run_dir, "size_lowered")[-1]["size"] == 48


@pytest.mark.slow
def test_trying_leaves_no_trace_in_weights_gradients_or_generators(
    make_recipe: MakeRecipe, console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[bool] = []
    inside = auto_sizes._try_learning

    def watched(learner: Any, *rest: Any) -> None:
        before = {name: tensor.clone() for name, tensor in learner.backbone.lm.state_dict().items()}
        state, micro = torch.get_rng_state(), learner.backbone.micro
        inside(learner, *rest)
        after = learner.backbone.lm.state_dict()
        seen.append(all(torch.equal(before[name], after[name]) for name in before))
        seen.append(torch.equal(state, torch.get_rng_state()))
        seen.append(all(master.grad is None for master in learner.optimizer.master.values()))
        seen.append(learner.optimizer.updates == 0 and learner.backbone.micro == micro)

    monkeypatch.setattr(auto_sizes, "_try_learning", watched)
    for dtype in ("float32", "bfloat16"):
        auto = {"batch": {"micro_train_tokens": "auto"}, "model": {"dtype": dtype}}
        train(make_recipe("sft", dtype, steps=1, **auto), console)
    assert seen == [True] * 8


def test_what_would_leave_no_room_for_the_optimizer_does_not_fit(
    make_recipe: MakeRecipe, console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(auto_sizes, "_moments_to_come", lambda learner: 10**15)  # pyright: ignore[reportUnknownLambdaType]
    with pytest.raises(RunError, match="no memory for one forward and backward"):
        train(make_recipe("sft", batch={"micro_train_tokens": "auto"}), console)


def test_where_nothing_can_be_planned_the_device_alone_says_what_fits(
    make_recipe: MakeRecipe, console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unknown(*_: Any) -> Any:
        raise UsageError("no device is called that")

    monkeypatch.setattr(estimates, "hardware_here", unknown)
    tight(monkeypatch, tokens=1500)
    recipe = make_recipe("sft", steps=1, batch={"micro_train_tokens": "auto"})
    train(recipe, console)
    assert [event["size"] for event in events(recipe.run_dir, "size_chosen")] == [1024]


@pytest.mark.slow
def test_a_recorded_size_that_cannot_hold_a_row_is_refused(
    make_recipe: MakeRecipe, console: Console
) -> None:
    recipe = make_recipe("sft", batch={"micro_train_tokens": "auto"})
    with pytest.raises(UsageError, match="--allow-change micro_train_tokens"):
        choose(recipe, {"micro_train_tokens": 47, "device": "cpu", "threads": 1})
    assert choose(recipe, {"micro_train_tokens": 48, "threads": 1}).micro_train_tokens == 48
    small = make_recipe("sft", steps=1, batch={"micro_train_tokens": "auto"})
    train(small, console)
    keys = ["micro_train_tokens"]
    resume(Path(small.run_dir), ["--steps", "2"], keys, console)
    assert len(events(small.run_dir, "size_chosen")) == 2  # chosen anew
