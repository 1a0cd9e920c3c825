"""Asked to stop: where nothing is lost, and the message says where that is."""

import json
import math
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from helpers.tiny_runs import MakeRecipe
from postgrad.checkpoint.store import CheckpointStore, SaveFailed
from postgrad.evaluation.results import Result
from postgrad.learner.learner import Learner
from postgrad.observe.console import Console
from postgrad.training import start
from postgrad.training.rl import RLJob
from postgrad.training.run import Stop, Stopped, StopSignals
from postgrad.training.start import resume, train

WAITING = "room is given up", "room is still waited for"  # what a person is told


@pytest.fixture(autouse=True)
def terminal() -> Iterator[None]:
    """A terminal that may close, also where these tests themselves run under nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


def silent(text: str) -> None:
    """Answers nobody."""


def ask(number: int = signal.SIGTERM) -> None:
    os.kill(os.getpid(), number)


def weights(run_dir: str, step: int) -> dict[str, torch.Tensor]:
    folder = Path(run_dir) / "checkpoints" / f"step-{step:06d}"
    return load_file(folder / "policy.weights.safetensors")


def saved(run_dir: str) -> list[str]:
    return sorted(path.name for path in (Path(run_dir) / "checkpoints").glob("step-*"))


def events(run_dir: str) -> list[str]:
    text = (Path(run_dir) / "events.jsonl").read_text("utf-8")
    return [json.loads(line)["event"] for line in text.splitlines()]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_at_a_boundary_a_signal_stops_at_once(number: int) -> None:
    with StopSignals(30, silent) as stop, pytest.raises(Stop):
        ask(number)
    assert stop.asked


def test_a_step_that_soon_ends_is_waited_for_and_one_that_does_not_is_not() -> None:
    with StopSignals(30, silent) as stop:
        stop.hold()
        stop.release()  # the last step held the weights for no time at all
        stop.hold()
        ask()
        assert stop.asked
        assert stop.held
        with pytest.raises(KeyboardInterrupt):  # a second signal stops at once
            ask()
    with StopSignals(30, silent) as unknown:
        unknown.hold()
        with pytest.raises(Stop):  # nothing is known of how long it will take
            ask()


def test_a_closed_terminal_may_be_said_twice() -> None:
    with StopSignals(30, silent) as stop:
        with pytest.raises(Stop):
            ask(signal.SIGHUP)
        ask(signal.SIGHUP)  # the state is being saved
        assert stop.asked


def test_under_nohup_a_closed_terminal_stops_nothing() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with StopSignals(30, silent) as stop:
            ask(signal.SIGHUP)
            assert not stop.asked
    finally:
        signal.signal(signal.SIGHUP, before)


def test_handlers_are_put_back() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with StopSignals(30, silent):
        assert signal.getsignal(signal.SIGTERM) != before
    assert signal.getsignal(signal.SIGTERM) == before


BUSY = """
import hashlib
from postgrad.training import run

run.PATIENCE_SECONDS = 0.2
with run.StopSignals(30, lambda text: print(text, flush=True)) as stop:
    stop.hold()
    stop.release()
    stop.hold()
    print("busy", flush=True)
    hashlib.pbkdf2_hmac("sha256", b"", b"", 2**31 - 1)  # one operation of half an hour
"""


@pytest.mark.slow
def test_signals_are_answered_and_a_second_one_obeyed_while_an_operation_does_not_return() -> None:
    command = [sys.executable, "-c", BUSY]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "busy\n"
        process.send_signal(signal.SIGINT)
        assert process.stdout.readline().startswith("Ctrl-C: this step is estimated to end in 0 s")
        process.send_signal(signal.SIGINT)
        assert process.stdout.readline().startswith("Ctrl-C again: the run stops at once")
        assert process.wait() == 1


def test_an_answer_says_what_happens_and_what_stands() -> None:
    answers: list[str] = []
    with StopSignals(30, answers.append), pytest.raises(Stop):
        ask()
    with StopSignals(30, answers.append) as unknown:
        unknown.hold()
        with pytest.raises(Stop):
            ask()
    saved, stopped = answers
    assert saved.startswith("SIGTERM: the run saves the state after the last completed step")
    assert "not estimated to end within checkpoint.grace_seconds = 30" in stopped


def test_in_a_wait_for_room_ctrl_c_or_a_second_signal_gives_up() -> None:
    answers: list[str] = []
    with StopSignals(30, answers.append) as stop, stop.waiting(*WAITING):
        ask(signal.SIGHUP)
        ask(signal.SIGHUP)
        assert stop.pause(0.0)
        ask(signal.SIGTERM)
        assert not stop.pause(3600.0)
    with StopSignals(30, answers.append) as stop, stop.waiting(*WAITING):
        ask(signal.SIGINT)
        assert not stop.pause(3600.0)
    with StopSignals(30, answers.append) as stop:
        with stop.waiting(*WAITING):
            ask()
            while len(answers) < 4:  # a thread of its own answers
                assert stop.pause(0.01)
        with pytest.raises(KeyboardInterrupt):  # the wait is over
            ask()
    assert answers == [
        "SIGHUP: room is still waited for",
        "SIGTERM again: the run stops at once; the last checkpoint is kept",
        "Ctrl-C: room is given up",
        "SIGTERM: room is still waited for",
        "SIGTERM again: the run stops at once; the last checkpoint is kept",
    ]


def test_interrupted_before_its_first_step_a_run_says_that_nothing_was_saved(
    make_recipe: Any, console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*arguments: Any, **named: Any) -> None:
        raise KeyboardInterrupt

    recipe = make_recipe("sft")
    with monkeypatch.context() as patch:
        patch.setattr(start, "prepare", interrupt)
        with pytest.raises(Stopped, match="interrupted: nothing was saved yet"):
            train(recipe, console)
    train(recipe, console)
    with monkeypatch.context() as patch:
        patch.setattr(start, "prepare", interrupt)
        with pytest.raises(Stopped, match=r"step 3 is kept; postgrad resume .* continues"):
            resume(Path(recipe.run_dir), ["--steps", "4"], [], console)


@pytest.mark.slow
def test_stopped_while_sampling_the_last_boundary_is_saved_and_gone_on_from(
    make_recipe: Any, trained: MakeRecipe, console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    uninterrupted = trained("rl", checkpoint={"save_steps": 0})
    stopped = make_recipe("rl", "stopped", checkpoint={"save_steps": 0})
    sample = RLJob._sample

    def asked(self: Any, state: Any) -> Any:
        if state.step == 2:
            ask()
        return sample(self, state)

    with monkeypatch.context() as patch:
        patch.setattr(RLJob, "_sample", asked)
        with pytest.raises(Stopped, match="stopped after step 2: the checkpoint of step 2 is kept"):
            train(stopped, console)
    assert saved(stopped.run_dir) == ["step-000002"]
    resume(Path(stopped.run_dir), [], [], console)
    a, b = weights(uninterrupted.run_dir, 3), weights(stopped.run_dir, 3)
    assert all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize(
    ("grace", "message", "checkpoints"),
    [
        (
            30.0,
            "stopped after step 2: the checkpoint of step 2 is kept",
            ["step-000001", "step-000002"],
        ),
        (0.0, "stopped in the middle of step 2.*the checkpoint of step 1 is kept", ["step-000001"]),
    ],
)
def test_stopped_while_weights_move_the_step_ends_where_that_is_estimated(
    grace: float,
    message: str,
    checkpoints: list[str],
    make_recipe: Any,
    console: Console,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    recipe = make_recipe("rl", checkpoint={"save_steps": 1, "grace_seconds": grace})
    update = Learner.update

    def asked(self: Any, update_asked: Any, algorithm: Any) -> Any:
        if self.optimizer.updates == 1:
            ask()
        return update(self, update_asked, algorithm)

    monkeypatch.setattr(Learner, "update", asked)
    with pytest.raises(Stopped, match=message):
        train(recipe, console)
    assert saved(recipe.run_dir) == checkpoints


@pytest.mark.slow
def test_a_save_that_fails_costs_the_save_and_not_the_run(
    make_recipe: Any, console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = make_recipe("rl", checkpoint={"save_steps": 1})
    save = CheckpointStore.save
    warnings: list[str] = []

    def full(self: Any, state: Any, tensors: Any, *, best: bool = False) -> Any:
        if state.step == 2:
            raise SaveFailed("the disk is full")
        return save(self, state, tensors, best=best)

    monkeypatch.setattr(CheckpointStore, "save", full)
    monkeypatch.setattr(console, "warn", warnings.append)
    assert train(recipe, console)["steps"] == 3
    assert saved(recipe.run_dir) == ["step-000001", "step-000003"]
    assert "save_failed" in events(recipe.run_dir)
    assert "the disk is full; the run goes on: the checkpoint of step 1 is kept" in warnings


def test_a_run_whose_last_checkpoint_cannot_be_saved_has_failed(
    make_recipe: Any, console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self: Any, state: Any, tensors: Any, *, best: bool = False) -> Any:
        raise SaveFailed("the disk is full")

    monkeypatch.setattr(CheckpointStore, "save", full)
    with pytest.raises(SaveFailed, match=r"^the disk is full$"):
        train(make_recipe("rl"), console)


def test_a_last_save_that_fails_names_the_checkpoint_that_is_kept(
    make_recipe: Any, console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    save = CheckpointStore.save

    def full(self: Any, state: Any, tensors: Any, *, best: bool = False) -> Any:
        if state.step == 3:
            raise SaveFailed("the disk is full")
        return save(self, state, tensors, best=best)

    recipe = make_recipe("sft", checkpoint={"save_steps": 2})
    monkeypatch.setattr(CheckpointStore, "save", full)
    with pytest.raises(SaveFailed) as raised:
        train(recipe, console)
    kept = "the checkpoint of step 2 is kept; continue with postgrad resume"
    assert str(raised.value).startswith(f"the disk is full; {kept}")
    monkeypatch.setattr(CheckpointStore, "save", save)
    assert resume(Path(recipe.run_dir), [], [], console)["steps"] == 3


def test_the_clock_asks_for_checkpoints_too(make_recipe: Any, console: Console) -> None:
    recipe = make_recipe("sft", checkpoint={"save_minutes": 1e-9, "max_ckpt_num": 9})
    train(recipe, console)
    assert saved(recipe.run_dir) == ["step-000001", "step-000002", "step-000003"]


@pytest.mark.slow
def test_passes_over_the_data_ask_for_checkpoints_too(make_recipe: Any, console: Console) -> None:
    """12 rows in updates of 8: 8, 16, 24, 32, 40 and 48 are settled, so that passes end in steps 2,
    3, 5 and 6.
    """
    every = {"max_ckpt_num": 9, "save_epochs": 1}
    recipe = make_recipe("sft", steps=6, data={"size": 12}, checkpoint=every)
    train(recipe, console)
    assert saved(recipe.run_dir) == [f"step-00000{step}" for step in (2, 3, 5, 6)]
    second = {"max_ckpt_num": 9, "save_epochs": 2}
    recipe = make_recipe("sft", "second", steps=7, data={"size": 12}, checkpoint=second)
    train(recipe, console)
    assert saved(recipe.run_dir) == [f"step-00000{step}" for step in (3, 6, 7)]


def standing_still(make_recipe: Any, best_metric: str) -> Any:
    """A run whose rate is so small that all its evaluations are equal: early stopping ends it."""
    return make_recipe(
        "sft",
        steps=9,
        learner={"lr": 1e-30},
        eval={"every": 1},
        checkpoint={"best_metric": best_metric, "early_stop": 2},
    )


@pytest.mark.slow
def test_early_stopping_ends_a_run_and_survives_a_resume(
    make_recipe: Any, console: Console
) -> None:
    """No evaluation after the first is better."""
    recipe = standing_still(make_recipe, "eval/accuracy")
    assert train(recipe, console)["steps"] == 2
    assert resume(Path(recipe.run_dir), [], [], console)["steps"] == 2
    longer = resume(Path(recipe.run_dir), ["--checkpoint.early_stop", "4"], [], console)
    assert longer["steps"] == 4


def test_an_evaluation_that_is_not_a_number_is_not_a_better_one(
    make_recipe: Any, console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those at the start and after step 1 are none, so there is nothing to beat; then 0.5, and two
    more that are none.
    """
    values = iter([math.nan, math.nan, 0.5, math.nan, math.nan])

    def by_metric(_: Result, shown: bool = False) -> dict[str, float]:
        return {} if shown else {"eval/reward": next(values)}

    monkeypatch.setattr(Result, "by_metric", by_metric)
    summary = train(standing_still(make_recipe, "eval/reward"), console)
    assert summary["steps"] == 4
    best = summary["best"]
    assert (best["value"], best["step"], best["waited"]) == (0.5, 2, 2)


@pytest.mark.parametrize(
    "change",
    [["--checkpoint.best_metric", "eval/response_length"], ["--checkpoint.best_mode", "min"]],
)
def test_another_best_metric_or_mode_begins_anew_at_a_resume(
    change: list[str], make_recipe: Any, console: Console
) -> None:
    """The first evaluation of the resume is the best by what is asked now, and early stopping
    counts from there.
    """
    recipe = standing_still(make_recipe, "eval/reward")
    assert train(recipe, console)["steps"] == 2
    summary = resume(Path(recipe.run_dir), change, [], console)
    assert summary["steps"] == 5
    assert (summary["best"]["step"], summary["best"]["waited"]) == (3, 2)
    best = Path(recipe.run_dir) / "checkpoints" / "best"
    assert best.read_text("utf-8").strip() == "step-000003"
