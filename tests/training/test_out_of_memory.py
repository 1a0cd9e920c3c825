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
from postgrad.core.errors import RunError
from postgrad.learner.learner import Learner
from postgrad.learner.optimizer import MasterOptimizer
from postgrad.observe.console import Console
from postgrad.parallel.device import ALLOCATOR
from postgrad.rollout.source import LiveSource
from postgrad.training import out_of_memory
from postgrad.training.out_of_memory import OutOfMemory, ran_out
from postgrad.training.peaks import DeviceFull
from postgrad.training.rl import RLJob
from postgrad.training.start import train

REFUSED = "[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"


# As torch 2.11 and 2.13 say it.
REFUSED_BY_GPU = (
    "CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of 79.15 GiB of "
    "which 1.00 GiB is free. Including non-PyTorch memory, this process has 78.15 GiB memory in "
    "use. Of the allocated memory 70.25 GiB is allocated by PyTorch, and 6.50 GiB is reserved by "
    "PyTorch but unallocated. If reserved but unallocated memory is large try setting "
    "PYTORCH_ALLOC_CONF=expandable_segments:True to avoid fragmentation.  See documentation for "
    "Memory Management  (https://docs.pytorch.org/docs/stable/notes/cuda.html)"
)


def fail_at(
    monkeypatch: pytest.MonkeyPatch,
    kind: type,
    name: str,
    call: int,
    error: BaseException | None = None,
) -> None:
    """The call of that number is refused memory."""
    original, calls = getattr(kind, name), [0]

    def method(self: Any, *args: Any, **named: Any) -> Any:
        calls[0] += 1
        if calls[0] == call:
            raise error or RuntimeError(REFUSED)
        return original(self, *args, **named)

    monkeypatch.setattr(kind, name, method)


def test_memory_that_is_refused_is_told_from_other_failures() -> None:
    for error in (
        torch.OutOfMemoryError("CUDA out of memory"),
        MemoryError(),
        RuntimeError(REFUSED),
    ):
        assert ran_out(error)
    with pytest.raises(MemoryError) as memory_error:
        np.zeros(2**57)
    assert ran_out(memory_error.value)
    with pytest.raises(RuntimeError) as torch_error:
        torch.empty(2**57)
    assert ran_out(torch_error.value)
    for error in (RuntimeError("shapes do not match"), ValueError(REFUSED), KeyError("memory")):
        assert not ran_out(error)


@pytest.mark.slow
def test_in_sampling_the_last_boundary_is_saved_and_the_run_goes_on_from_it(
    make_recipe: MakeRecipe,
    trained: MakeRecipe,
    console: Console,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rare = {"checkpoint": {"save_steps": 0}}
    uninterrupted, failed = trained("rl", **rare), make_recipe("rl", "failed", **rare)
    with monkeypatch.context() as patch:
        fail_at(patch, LiveSource, "next", 3)
        with pytest.raises(OutOfMemory, match=r"sample of step 3.*2 is kept.*rollout\.slots 8"):
            train(failed, console)
    train(failed, console)
    assert_same_run(uninterrupted, failed, 3)


@pytest.mark.slow
def test_in_an_update_the_last_checkpoint_stands(
    make_recipe: MakeRecipe,
    trained: MakeRecipe,
    console: Console,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    uninterrupted, failed = trained("rl"), make_recipe("rl", "failed")
    with monkeypatch.context() as patch:
        fail_at(patch, MasterOptimizer, "step", 3)
        with pytest.raises(OutOfMemory, match=r"train/update of step 3.* of step 2 is kept"):
            train(failed, console)
    assert not (Path(failed.run_dir) / "checkpoints" / "step-000003").exists()
    train(failed, console)
    assert_same_run(uninterrupted, failed, 3)


@pytest.mark.slow
def test_the_command_that_is_named_goes_on(
    make_recipe: MakeRecipe, console: Console, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    recipe = make_recipe("rl")
    with monkeypatch.context() as patch:
        fail_at(patch, Learner, "update", 2)
        with pytest.raises(OutOfMemory) as error:
            train(recipe, console)
    assert error.value.exit_code == 1
    text = str(error.value)
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

    monkeypatch.setattr(out_of_memory.estimates, "facts_here", unknown)
    fail_at(monkeypatch, Learner, "update", 1)
    with pytest.raises(OutOfMemory, match=r"smaller batch\.micro_train_tokens"):
        train(make_recipe("sft"), console)


def test_a_gpu_that_has_no_memory_says_what_was_reserved_and_fragmented(
    make_recipe: MakeRecipe, console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ALLOCATOR:
        monkeypatch.delenv(name, raising=False)
    recipe = make_recipe("sft")
    fail_at(monkeypatch, Learner, "update", 1, torch.OutOfMemoryError(REFUSED_BY_GPU))
    with pytest.raises(OutOfMemory) as error:
        train(recipe, console)
    text = str(error.value)
    assert "CUDA out of memory: torch had reserved 82.41 GB: 75.43 GB allocated" in text
    assert "6.98 GB fragmented" in text
    assert "1.07 GB of the GPU were free and 2.68 GB asked for" in text
    assert "set PYTORCH_ALLOC_CONF=expandable_segments:True" in text
    assert "postgrad resume" in text
    events = (Path(recipe.run_dir) / "events.jsonl").read_text("utf-8").splitlines()
    (event,) = (e for e in map(json.loads, events) if e["event"] == "out_of_memory")
    assert event["fragmented"] == int(6.5 * 2**30)
    assert event["allocated"] == int(70.25 * 2**30)


def test_a_setting_is_advised_only_where_it_helps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ALLOCATOR[0], "max_split_size_mb:512")
    monkeypatch.delenv(ALLOCATOR[1], raising=False)
    roomy = DeviceFull(asked=100, free=30, allocated=800, fragmented=80)
    assert f"{ALLOCATOR[0]}=max_split_size_mb:512,expandable_segments:True" in roomy.text()
    full = DeviceFull(asked=100, free=30, allocated=860, fragmented=20)
    assert "set " not in full.text()
    monkeypatch.setenv(ALLOCATOR[0], "expandable_segments:True")
    assert "set " not in roomy.text()


def test_what_a_rank_says_of_its_gpu_is_read_where_it_arrives() -> None:
    arrived = RunError("rank 3 failed")
    arrived.__cause__ = torch.OutOfMemoryError(REFUSED_BY_GPU)
    refusal = DeviceFull.of(arrived)
    assert refusal is not None
    assert refusal.free == 2**30
    assert DeviceFull.of(MemoryError("no room")) is None
    assert DeviceFull.of(None) is None
