"""Runs whose first process has no GPU, and whose ranks have: without Ray, and without a GPU."""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from helpers.fake_ranks import FakeGroup, NoPlaces
from helpers.runs import lines
from postgrad.core.errors import UsageError
from postgrad.core.process import Handle, done
from postgrad.fleet import members
from postgrad.fleet.engines import EngineWorker
from postgrad.fleet.ranked import RankedFleet
from postgrad.observe.console import Console
from postgrad.training import prepare
from postgrad.training.prepare import repeated_rows
from postgrad.training.start import train

CLUSTER = {
    "type": "ray",
    "address": "head:6379",
    "policy": {"gpus": 1},
    "rollout": {"workers": 1},
}


class Disguised(FakeGroup):
    """A rank on another machine. What it takes for a GPU there is the CPU here."""

    def __init__(self, context: Any) -> None:
        assert context.choices.device == "cuda"
        super().__init__(context.recipe, replace(context.choices, device="cpu"))


class Worker:
    """A rollout worker on another machine, as `cluster.workers.Workers` of one process."""

    size, places = 1, (("10.0.0.2", 7),)

    def __init__(self, title: str, worker: str, arguments: Sequence[Any], *more: Any) -> None:
        recipe, choices = arguments
        self._worker = EngineWorker(recipe, replace(choices, device="cpu"))

    def call(self, method: str, *arguments: Any) -> Handle[Any]:
        if method == "keep_images":  # this process has the store of the run
            return done(None)
        if method == "build":
            path, choices, *sizes = arguments
            built = self._worker.build(path, replace(choices, device="cpu"), *sizes)
            return done(replace(built, device=choices.device))
        return done(getattr(self._worker, method)(*arguments))

    def description(self) -> str:
        return "a rollout worker"

    def close(self) -> None: ...


@pytest.fixture
def groups(monkeypatch: pytest.MonkeyPatch) -> list[Disguised]:
    """The groups of ranks of runs that started."""
    rank_groups: list[Disguised] = []

    def start(context: Any, stack: ExitStack, *more: Any, session: Any = None) -> RankedFleet:
        rank_groups.append(Disguised(context))
        session.reservation = NoPlaces()
        return RankedFleet(context, rank_groups[-1], session, *more)

    monkeypatch.setattr(RankedFleet, "start", start)
    monkeypatch.setattr(members, "Workers", Worker)
    return rank_groups


@pytest.mark.slow
def test_a_controller_without_a_gpu_leads_a_run_on_gpus(
    make_recipe: Any, console: Console, groups: list[Disguised]
) -> None:
    """torch here is without CUDA or without a device: whatever asks for one raises."""
    recipe = make_recipe("rl", cluster=CLUSTER)
    train(recipe.model_copy(update={"steps": 2}), console)
    folder = Path(recipe.run_dir)
    assert [line["step"] for line in lines(folder / "metrics.jsonl")] == [1, 2]
    started = next(e for e in lines(folder / "events.jsonl") if e["event"] == "started")
    assert (started["device"], started["dtype"]) == ("cuda", "bfloat16")
    train(recipe, console)  # goes on where it was
    assert len(lines(folder / "metrics.jsonl")) == 3
    (first, second) = groups
    for group in (first, second):  # after the start; before, within and after each publish
        assert [method for method, *_ in group.calls].count("free_memory") >= 1 + 3


def test_sizes_that_only_the_other_machine_could_try_have_to_be_stated(
    make_recipe: Any, console: Console, groups: list[Disguised]
) -> None:
    recipe = make_recipe("rl", cluster=CLUSTER, batch={"micro_train_tokens": "auto"})
    with pytest.raises(UsageError, match=r"GPUs are on other machines, .* that are \"auto\""):
        train(recipe, console)
    assert groups == []


@pytest.mark.parametrize(
    ("job", "batch", "expected_text"),
    [
        ("sft", {"train_batch_size": 64}, "batch.train_batch_size = 64 is more than the 40 train"),
        ("sft", {"train_batch_size": 40}, None),
        ("rl", {"rollout_batch_size": 50}, "batch.rollout_batch_size = 50 is more than the 40"),
        ("rl", {"rollout_batch_size": 40}, None),  # 160 samples, of 40 different rows
    ],
)
def test_a_step_that_draws_rows_more_than_once_is_told(
    make_recipe: Any, job: str, batch: dict[str, int], expected_text: str | None
) -> None:
    text = repeated_rows(make_recipe(job, batch=batch).geometry(40), 40)
    assert text is None if expected_text is None else expected_text in str(text)


def test_more_threads_than_cpus_are_told_and_kept_at_a_start_and_at_a_resume(
    make_recipe: Any, console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A smaller machine goes on to the same bits, slowly."""
    monkeypatch.setattr(prepare, "usable_cpus", lambda: 4)
    recipe = make_recipe("sft", learner={"threads": 2})
    train(recipe.model_copy(update={"steps": 1}), console)
    events = Path(recipe.run_dir) / "events.jsonl"
    assert all(event["event"] != "threads" for event in lines(events))
    monkeypatch.setattr(prepare, "usable_cpus", lambda: 1)
    train(recipe.model_copy(update={"steps": 2}), console)
    (text,) = [event["message"] for event in lines(events) if event["event"] == "threads"]
    assert text.startswith("learner.threads = 2, and this process may use 1 CPU: threads that wait")
    assert "--learner.threads 1 is faster" in text
    (resumed,) = [event for event in lines(events) if event["event"] == "resumed"]
    assert resumed["threads"] == 2
