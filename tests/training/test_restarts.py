"""How often a run that loses processes restarts; tests/training/test_lost.py kills real ones."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from postgrad.core.errors import RunError, UsageError, WorkerLost
from postgrad.observe.console import Console
from postgrad.observe.run_dir import RunDirectory
from postgrad.training.saving import store_of
from postgrad.training.start import with_restarts


class Losing:
    """Loses a process at each of the steps given, having saved that step; then ends."""

    def __init__(self, folder: Path, steps: list[int]) -> None:
        self.folder = folder
        self.steps = steps
        self.asked: list[tuple[int, int]] = []

    def __call__(self, restarts: int, saved: int) -> str:
        self.asked.append((restarts, saved))
        if not self.steps:
            return "done"
        step = self.steps.pop(0)
        if step:
            (self.folder / f"step-{step:06d}").mkdir(parents=True, exist_ok=True)
            (self.folder / f"step-{step:06d}" / "manifest.json").write_text("{}")
        raise WorkerLost(f"rank 1 died in step {step + 1}")


@pytest.fixture
def run(make_recipe: Any, console: Console) -> Callable[[list[int], int], Any]:
    def base_recipe(steps: list[int], most: int) -> Any:
        cluster = {"type": "ray", "max_restarts": most}
        recipe = make_recipe("sft", "run", cluster=cluster)
        directory = RunDirectory.create(Path(recipe.run_dir), recipe.dump(), overwrite=True)
        losing = Losing(store_of(recipe, directory).root, steps)

        def go(once: Callable[[int, int], str] = losing) -> str:
            return with_restarts(once, recipe, directory, console)

        return losing, go, directory

    return base_recipe


def events(directory: RunDirectory) -> list[dict[str, Any]]:
    path = directory.path / "events.jsonl"
    return [json.loads(line) for line in path.open()] if path.exists() else []


def test_a_run_that_lost_nothing_is_run_once(run: Any) -> None:
    losing, go, directory = run([], 3)
    assert go() == "done"
    assert losing.asked == [(0, 0)]
    assert events(directory) == []


def test_each_loss_is_recorded_with_its_cause_and_where_the_run_goes_on(run: Any) -> None:
    losing, go, directory = run([0, 2], 1)
    assert go() == "done"
    assert losing.asked == [(0, 0), (1, 0), (2, 2)]
    first, second = events(directory)
    assert (first["event"], first["step"], first["restarts"]) == ("restarted", 0, 1)
    assert (second["event"], second["step"], second["restarts"]) == ("restarted", 2, 2)
    assert "rank 1 died in step 3; the checkpoint of step 2 is kept" in second["message"]


def test_losses_without_a_newer_checkpoint_end_the_run_with_the_cause(run: Any) -> None:
    losing, go, directory = run([2, 2, 2, 2], 2)
    pattern = (
        r"rank 1 died in step 3; the checkpoint of step 2 is kept; cluster\.max_restarts = 2: it "
        "is not restarted; continue with postgrad resume "
    )
    with pytest.raises(RunError, match=pattern):
        go()
    assert len(losing.asked) == 3
    assert len(events(directory)) == 2


def test_a_newer_checkpoint_counts_from_the_beginning(run: Any) -> None:
    losing, go, _ = run([1, 2, 3, 4, 5], 1)
    assert go() == "done"
    assert len(losing.asked) == 6


def test_without_restarts_the_first_loss_ends_the_run(run: Any) -> None:
    _, go, directory = run([1], 0)
    with pytest.raises(RunError, match="rank 1 died"):
        go()
    assert events(directory) == []


def test_other_errors_are_not_tried_again(run: Any) -> None:
    _, go, directory = run([], 3)
    calls: list[int] = []

    def wrong(restarts: int, saved: int) -> str:
        calls.append(restarts)
        raise UsageError("the data are wrong")

    with pytest.raises(UsageError):
        go(wrong)
    assert calls == [0]
    assert events(directory) == []
