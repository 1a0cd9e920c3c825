"""Runs with loggers: the same numbers as metrics.jsonl, one curve after a kill."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from helpers import logged
from helpers.jobs import write_recipe
from helpers.runs import lines, train_until_killed
from postgrad.api.run import Run
from postgrad.observe.console import Console
from postgrad.observe.loggers.all import recorded
from postgrad.observe.loggers.mlflow import metric_name
from postgrad.observe.run_dir import RunDirectory
from postgrad.tools.fork import fork
from postgrad.training.rl import RLJob
from postgrad.training.saving import store_of
from postgrad.training.start import resume, train

pytest.importorskip("tensorboard")
Patch = pytest.MonkeyPatch
ROOT = Path(__file__).parents[2]


def own_metrics(run_dir: Path) -> logged.Steps:
    """What the run's own files say."""
    return {step: dict(values) for step, values in recorded(run_dir)}


def assert_same(logged_steps: logged.Steps, wanted: logged.Steps) -> None:
    """Every step, every number; float32 is what TensorBoard keeps."""
    assert logged_steps.keys() == wanted.keys()
    for step, values in wanted.items():
        assert logged_steps[step] == pytest.approx(values, rel=1e-6, abs=1e-30), step


def test_tensorboard_draws_what_metrics_jsonl_says(make_recipe: Any, console: Console) -> None:
    recipe = make_recipe("rl", observe={"loggers": ["tensorboard"]}, eval={"every": 2})
    train(recipe, console)
    run = Path(recipe.run_dir)
    assert_same(logged.tensorboard(run), own_metrics(run))
    assert {"reward", "eval/accuracy", "sample_seconds"} <= logged.tensorboard(run)[2].keys()


@pytest.mark.slow
def test_a_run_resumed_with_tensorboard_has_no_step_twice_and_none_missing(
    make_recipe: Any, console: Console, monkeypatch: Patch
) -> None:
    recipe = make_recipe(
        "rl", steps=4, observe={"loggers": ["tensorboard"]}, checkpoint={"save_steps": 2}
    )
    train_until_killed(monkeypatch, RLJob, 3, recipe, console)
    run = Path(recipe.run_dir)
    assert max(logged.tensorboard(run)) == 3  # after the checkpoint of step 2
    _wait_for_another_second()
    resume(run, [], [], console)
    assert_same(logged.tensorboard(run), own_metrics(run))


@pytest.mark.slow
def test_a_logger_added_at_a_resume_is_told_the_whole_run(
    make_recipe: Any, console: Console
) -> None:
    recipe = make_recipe("rl", "run")
    train(recipe, console)
    run = Path(recipe.run_dir)
    resume(run, ["--steps", "4", "--observe.loggers", '["tensorboard"]'], [], console)
    assert sorted(logged.tensorboard(run)) == [0, 1, 2, 3, 4]
    assert_same(logged.tensorboard(run), own_metrics(run))


def test_a_logger_that_breaks_in_the_run_is_an_event_and_the_run_goes_on(
    make_recipe: Any, monkeypatch: Patch, capsys: pytest.CaptureFixture[str]
) -> None:
    from postgrad.observe.loggers.tensorboard import TensorBoard

    right = TensorBoard.log

    def log(self: Any, step: int, values: Any) -> None:
        if step == 2:
            raise OSError("the disk of the curves is full")
        right(self, step, values)

    monkeypatch.setattr(TensorBoard, "log", log)
    recipe = make_recipe("rl", observe={"loggers": ["tensorboard"]})
    assert train(recipe, Console("quiet"))["steps"] == 3
    events = [
        e for e in lines(Path(recipe.run_dir) / "events.jsonl") if e["event"] == "logger_failed"
    ]
    assert len(events) == 1
    assert "the disk of the curves is full" in events[0]["message"]
    assert capsys.readouterr().out.count("the logger tensorboard failed") == 1


def _wait_for_another_second() -> None:
    """Event files are named, and read, in the order of their seconds; a process takes longer."""
    now = int(time.time())
    while int(time.time()) == now:
        time.sleep(0.01)


@pytest.mark.slow
@pytest.mark.long
def test_a_killed_process_and_a_resumed_one_draw_one_curve_everywhere(
    tmp_path: Path, monkeypatch: Patch
) -> None:
    """SIGKILL, in the middle of whatever happens; W&B offline; trackio's own database."""
    pytest.importorskip("wandb")
    pytest.importorskip("trackio")
    pytest.importorskip("mlflow")
    pytest.importorskip("alembic")
    recipe = write_recipe("grpo with kl", tmp_path)
    run, database = tmp_path / "run", logged.mlflow_variables(tmp_path)
    monkeypatch.setenv("MLFLOW_REGISTRY_URI", database["MLFLOW_REGISTRY_URI"])
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]),
        "WANDB_MODE": "offline",
        "TRACKIO_DIR": str(tmp_path / "trackio"),
        **database,
    }
    flags = [
        "--run_dir", str(run), "--steps", "60", "--eval.every", "5", "--checkpoint.save_steps", "7",
        "--observe.loggers", '["tensorboard", "wandb", "trackio", "mlflow"]',
    ]  # fmt: skip
    command = [sys.executable, "-m", "postgrad", "train", str(recipe), *flags, "--quiet"]
    for steps in (12, 24, None):
        process = subprocess.Popen(command, env=environment, cwd=tmp_path)
        if steps is None:
            assert process.wait(300) == 0
            break
        deadline = time.monotonic() + 300
        while _steps(run) < steps and time.monotonic() < deadline:
            time.sleep(0.02)
        process.send_signal(signal.SIGKILL)
        process.wait()
    wanted = own_metrics(run)
    assert sorted(wanted) == list(range(1, 61))
    assert_same(logged.tensorboard(run), wanted)
    curves = logged.trackio(tmp_path / "trackio", "postgrad")
    assert len(curves) == 1
    _assert_timeless(*curves.values(), wanted)
    curves = logged.mlflow(database["MLFLOW_TRACKING_URI"], "postgrad")
    assert len(curves) == 1
    _assert_timeless(*curves.values(), _as_in_mlflow(wanted))
    processes = logged.wandb_offline(run)
    assert len({name for name, _ in processes}) == 1
    assert len(processes) == 3
    assert_same(processes[-1][1], wanted)


def _as_in_mlflow(steps: logged.Steps) -> logged.Steps:
    return {
        step: {"step": float(step)} | {metric_name(name): value for name, value in values.items()}
        for step, values in steps.items()
    }


def _assert_timeless(logged_steps: logged.Steps, wanted: logged.Steps) -> None:
    """Steps that were made again took another time, and are the same else."""
    endings = ("_seconds", "_bytes", "_per_second", "_time_fraction")
    cut = [
        {
            s: {k: v for k, v in each.items() if not k.endswith(endings)}
            for s, each in steps_by_number.items()
        }
        for steps_by_number in (logged_steps, wanted)
    ]
    assert_same(*cut)


def _steps(run: Path) -> int:
    path = run / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


@pytest.mark.slow
def test_a_fork_is_a_curve_of_its_own_from_the_first_step(
    make_recipe: Any, console: Console, tmp_path: Path
) -> None:
    recipe = make_recipe("rl", steps=4, observe={"loggers": ["tensorboard"]})
    train(recipe, console)
    run, to = Path(recipe.run_dir), tmp_path / "fork"
    steps = sorted(info.step for info in Run(run).checkpoints)
    drawn = logged.tensorboard(run)
    fork(run, str(steps[0]), to, console)
    resume(to, [], [], console)
    assert_same(logged.tensorboard(to), own_metrics(to))
    assert (min(logged.tensorboard(to)), max(logged.tensorboard(to))) == (0, 4)
    assert logged.tensorboard(run) == drawn
    ids = [store_of(recipe, RunDirectory(path)).load().state.loggers["id"] for path in (run, to)]
    assert ids[0] != ids[1]
