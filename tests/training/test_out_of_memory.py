"""Out of memory in a run: nothing half is saved, and the message says what to change."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from helpers.runs import assert_same_run
from helpers.tiny_runs import MakeRecipe
from postgrad.cli.main import main
from postgrad.learner.optimizer import MasterOptimizer
from postgrad.learner.role import Learner
from postgrad.observe.console import Console
from postgrad.rollout.source import LiveSource
from postgrad.training import memory
from postgrad.training.memory import OutOfMemory, ran_out
from postgrad.training.rl import RLJob
from postgrad.training.start import train

REFUSED = "[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"


def fail_at(monkeypatch: pytest.MonkeyPatch, kind: type, name: str, call: int) -> None:
    """The call of that number is refused memory."""
    whole, calls = getattr(kind, name), [0]

    def method(self: Any, *args: Any, **named: Any) -> Any:
        calls[0] += 1
        if calls[0] == call:
            raise RuntimeError(REFUSED)
        return whole(self, *args, **named)

    monkeypatch.setattr(kind, name, method)


def test_memory_that_is_refused_is_told_from_other_failures() -> None:
    for error in (
        torch.OutOfMemoryError("CUDA out of memory"),
        MemoryError(),
        RuntimeError(REFUSED),
    ):
        assert ran_out(error)
    with pytest.raises(MemoryError) as found:
        np.zeros(2**57)
    assert ran_out(found.value)
    with pytest.raises(RuntimeError) as said:
        torch.empty(2**57)
    assert ran_out(said.value)
    for error in (RuntimeError("shapes do not match"), ValueError(REFUSED), KeyError("memory")):
        assert not ran_out(error)


def test_in_sampling_the_last_boundary_is_saved_and_the_run_goes_on_from_it(
    make_recipe: MakeRecipe,
    trained: MakeRecipe,
    console: Console,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rare = {"checkpoint": {"save_steps": 0}}
    whole, failed = trained("rl", **rare), make_recipe("rl", "failed", **rare)
    with monkeypatch.context() as patch:
        fail_at(patch, LiveSource, "next", 3)
        with pytest.raises(OutOfMemory, match=r"sample of step 3.*step 2 stands.*rollout\.slots 8"):
            train(failed, console)
    train(failed, console)
    assert_same_run(whole, failed, 3)


def test_in_an_update_the_last_checkpoint_stands(
    make_recipe: MakeRecipe,
    trained: MakeRecipe,
    console: Console,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    whole, failed = trained("rl"), make_recipe("rl", "failed")
    with monkeypatch.context() as patch:
        fail_at(patch, MasterOptimizer, "step", 3)
        with pytest.raises(OutOfMemory, match=r"train/update of step 3.* of step 2 stands"):
            train(failed, console)
    assert not (Path(failed.run_dir) / "checkpoints" / "step-000003").exists()
    train(failed, console)
    assert_same_run(whole, failed, 3)


def test_the_command_that_is_named_goes_on(
    make_recipe: MakeRecipe, console: Console, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    recipe = make_recipe("rl")
    with monkeypatch.context() as patch:
        fail_at(patch, Learner, "update", 2)
        with pytest.raises(OutOfMemory) as found:
            train(recipe, console)
    assert found.value.exit_code == 1
    text = str(found.value)
    size = re.search(r"--batch\.micro_train_tokens (\d+)", text)
    assert size is not None
    assert int(size[1]) < 2048
    words = text[text.index("postgrad resume") :].split()
    assert main(words[1:]) == 0
    summary = json.loads((Path(recipe.run_dir) / "summary.json").read_text("utf-8"))
    assert summary["steps"] == 3


def test_while_a_model_is_loaded_nothing_was_trained(
    make_recipe: MakeRecipe, console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = make_recipe("sft")
    fail_at(monkeypatch, MasterOptimizer, "__init__", 1)
    with pytest.raises(OutOfMemory, match=r"phase load.*nothing was trained yet"):
        train(recipe, console)


def test_other_failures_are_not_explained_away(
    make_recipe: MakeRecipe, console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any) -> Any:
        raise RuntimeError("shapes do not match")

    monkeypatch.setattr(RLJob, "step", broken)
    with pytest.raises(RuntimeError, match="shapes do not match"):
        train(make_recipe("rl"), console)


def test_without_a_plan_the_ways_out_are_named_in_general(
    make_recipe: MakeRecipe, console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unknown(*_: Any) -> Any:
        raise OSError("no network")

    monkeypatch.setattr(memory.foreseen, "facts_here", unknown)
    fail_at(monkeypatch, Learner, "update", 1)
    with pytest.raises(OutOfMemory, match=r"smaller batch\.micro_train_tokens"):
        train(make_recipe("sft"), console)
