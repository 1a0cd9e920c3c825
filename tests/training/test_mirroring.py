"""Uploads behind the steps: what waits, what fails, and what the end of a run says of it."""

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest

from helpers.failing_store import FailingStore
from helpers.runs import assert_same_run, lines
from helpers.tiny_runs import MakeRecipe
from postgrad.checkpoint.mirror import Mirror, Owner
from postgrad.cli.main import main
from postgrad.observe.console import Console
from postgrad.recipe.load import as_toml, with_overrides
from postgrad.recipe.recipe import Recipe
from postgrad.tools.checkpoints import checkpoints
from postgrad.training import mirroring
from postgrad.training.mirroring import Uploader
from postgrad.training.run import StopSignals
from postgrad.training.sft import SFTJob
from postgrad.training.start import train

URL = "failing://bucket/run"
SAVES = {"save_steps": 1, "max_ckpt_num": 1}


@pytest.fixture(autouse=True)
def _empty_store(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(mirroring, "RETRY_SECONDS", 0.0)
    FailingStore.reset()
    yield
    FailingStore.reset()


def events(recipe: Recipe, kind: str) -> list[dict[str, Any]]:
    path = Path(recipe.run_dir) / "events.jsonl"
    return [event for event in lines(path) if event["event"] == kind]


def fail_during(monkeypatch: pytest.MonkeyPatch, first: int, last: int) -> None:
    """The network is down from the end of step `first` until that of step `last`."""
    original_step = SFTJob.step

    def step(self: Any, state: Any) -> Any:
        result = original_step(self, state)
        FailingStore.changes, FailingStore.fails_on = 0, True
        FailingStore.fails_at = int(first <= result[0].step < last)
        return result

    monkeypatch.setattr(SFTJob, "step", step)


def test_a_network_that_is_down_for_a_while_costs_a_warning_and_nothing_else(
    make_recipe: MakeRecipe, trained: MakeRecipe, console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    never = trained("sft", checkpoint=SAVES)
    recipe = make_recipe("sft", checkpoint={**SAVES, "mirror": URL})
    fail_during(monkeypatch, 1, 3)
    summary = train(recipe, console)
    assert_same_run(never, recipe, 3)
    failed = events(recipe, "mirror_failed")
    assert failed
    assert all("the network is down" in event["message"] for event in failed)
    assert failed[0]["message"].startswith("the mirror lacks the checkpoint of step")
    assert Mirror(URL).steps() == [3]
    assert summary["mirror"] == {"url": URL, "step": 3, "behind": False}


def test_a_last_upload_that_fails_is_told_and_the_same_command_ends_it(
    make_recipe: MakeRecipe, tmp_path: Path, console: Console, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    recipe = make_recipe("sft", checkpoint={**SAVES, "mirror": URL, "save_hf": True})
    path = tmp_path / "recipe.toml"
    path.write_text(as_toml(recipe.dump()), "utf-8")
    with monkeypatch.context() as patch:
        fail_during(patch, 3, 9)
        assert main(["train", str(path)]) == 1
    captured = capsys.readouterr()
    assert f"{URL} is behind: it has step" in captured.out
    assert (Path(recipe.run_dir) / "model" / "config.json").exists()
    last = events(recipe, "mirror_failed")[-1]["message"]
    assert last.startswith("the mirror lacks the checkpoint of step 3, which is on the disk")
    FailingStore.calm()
    assert main(["train", str(path), "--quiet"]) == 0
    assert Mirror(URL).steps() == [3]
    assert main(["train", str(path), "--quiet"]) == 0  # there is nothing to do
    assert len(events(recipe, "resumed")) == 1


class SlowStore(FailingStore):
    """A store in which the first checkpoint's upload waits until it may go on."""

    protocol = "slow"
    store: dict[str, Any] = {}
    pseudo_dirs = [""]
    go_on = threading.Event()

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return super()._strip_protocol(path.removeprefix("slow://"))

    def open(self, path: str, mode: str = "rb", **kwargs: Any) -> Any:
        if "w" in mode and path.endswith(".safetensors"):
            assert self.go_on.wait(60.0)
        return super().open(path, mode, **kwargs)


@pytest.fixture
def slow() -> Iterator[str]:
    """The URL of a mirror whose uploads wait for `SlowStore.go_on`."""
    fsspec.register_implementation("slow", SlowStore, clobber=True)
    SlowStore.reset()
    SlowStore.go_on.clear()
    yield "slow://bucket/run"
    SlowStore.go_on.set()
    for thread in threading.enumerate():
        if thread.name == "mirror":  # it was given up, and goes on
            thread.join()


def test_ctrl_c_gives_up_the_last_upload_and_the_run_says_so(
    slow: str, make_recipe: MakeRecipe, console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    original_pause, waits = StopSignals.pause, [0]

    def pause(self: StopSignals, seconds: float) -> bool:
        waits[0] += 1
        if waits[0] == 3:
            os.kill(os.getpid(), signal.SIGINT)
        return original_pause(self, seconds)

    monkeypatch.setattr(StopSignals, "pause", pause)
    recipe = make_recipe("sft", steps=1, checkpoint={**SAVES, "mirror": slow})
    assert train(recipe, console)["mirror"] == {"url": slow, "step": None, "behind": True}
    assert waits[0] in (3, 4)


@pytest.mark.parametrize(
    ("more", "steps"),
    [({}, [4]), ({"keep_steps": 2}, [2, 4]), ({"best_metric": "eval/reward"}, None)],
)
def test_a_newer_checkpoint_takes_the_place_of_one_that_waits(
    more: dict[str, Any],
    steps: list[int] | None,
    slow: str,
    make_recipe: MakeRecipe,
    console: Console,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first one is uploaded whole, though the disk keeps one and three were saved since. What
    is never removed is uploaded too.
    """
    evaluated = {"every": 1} if "best_metric" in more else {}
    recipe = make_recipe(
        "sft", steps=4, checkpoint={**SAVES, "mirror": slow, **more}, eval=evaluated
    )
    seen: list[list[int]] = []
    original_offer = Uploader.offer

    def offer(self: Uploader, step: int) -> None:
        original_offer(self, step)
        seen.append(self._run.store.steps())
        if step == 4:
            SlowStore.go_on.set()

    monkeypatch.setattr(Uploader, "offer", offer)
    summary = train(recipe, console)
    assert all(1 in there for there in seen)  # held while it was uploaded
    wanted = steps or sorted({summary["best"]["step"], 4})
    uploaded = [event["step"] for event in events(recipe, "mirrored")]
    assert uploaded == [1, 4, *(step for step in wanted if step not in (1, 4))]
    assert Mirror(slow).steps() == wanted
    assert summary["mirror"]["step"] == 4


def test_a_process_that_was_replaced_trains_on_and_says_so_once(
    make_recipe: MakeRecipe, console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = make_recipe("sft", steps=5, checkpoint={**SAVES, "mirror": URL})
    original_step = SFTJob.step

    def step(self: Any, state: Any) -> Any:
        if state.step == 1:
            Mirror(URL).claim(Owner("0" * 32, {}))
        return original_step(self, state)

    monkeypatch.setattr(SFTJob, "step", step)
    summary = train(recipe, console)
    [event] = events(recipe, "mirror_failed")
    assert "another process has continued the run" in event["message"]
    assert summary["steps"] == 5
    assert summary["mirror"]["behind"]
    kept = sorted(path.name for path in (Path(recipe.run_dir) / "checkpoints").glob("step-*"))
    assert kept == ["step-000005"]  # nothing is held for uploads that never come


def test_the_table_of_checkpoints_and_the_start_name_the_mirror(
    make_recipe: MakeRecipe, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    recipe = make_recipe("sft", checkpoint={**SAVES, "max_ckpt_num": 2, "mirror": URL})
    train(with_overrides(recipe, ["--steps", "2"]), Console("plain"))
    fail_during(monkeypatch, 3, 9)
    train(recipe, Console("plain"))
    shown = capsys.readouterr()
    output = shown.out + shown.err
    assert f"mirror: {URL} gets each checkpoint behind the next steps; it has none yet" in output
    assert f"waiting until {URL} has the checkpoint of step 3" in output
    table = checkpoints(Path(recipe.run_dir), Console("plain"))
    assert [(info["step"], info["mirrored"]) for info in table] == [(2, True), (3, False)]
    shown = capsys.readouterr()
    assert "complete, mirrored" in shown.out
    assert f"mirror {URL} had those of steps" in shown.out + shown.err
