"""Sweeps as a person types them: real runs of a tiny model, killed, resumed, failed, looked at."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import postgrad
from helpers.jobs import write_recipe
from postgrad.cli.main import main
from postgrad.core.errors import UsageError
from postgrad.observe.console import Console
from postgrad.recipe.sweep import parse_swept, sweep_of
from postgrad.tools.sweep.run import Command, resume_sweep, train_sweep
from postgrad.tools.verify_resume import fingerprint

QUIET = Console("quiet")
ALONE = Command(at_once=1)


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    (tmp_path / "recipe").mkdir()
    return write_recipe("sft", tmp_path / "recipe")


def typed(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, dict[str, Any]]:
    code = main([*words, "--json", "--quiet"])
    return code, json.loads(capsys.readouterr().out)


def test_flags_of_single_runs_are_refused(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words, message in (
        (["--sweep", "seed=1", "--dry-run"], "--dry-run is for one run"),
        (["--sweep", "seed=1", "--profile"], "--profile is for one run"),
        (["--at-once", "2"], "--at-once is for a sweep"),
        (["--sweep", "seed=1", "--at-once", "0"], "--at-once 0"),
    ):
        assert main(["train", str(recipe), *words]) == 2
        assert message in capsys.readouterr().err


def test_a_folder_of_something_else_is_left_alone(recipe: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("", "utf-8")
    (tmp_path / "others").mkdir()
    (tmp_path / "others" / "thesis.txt").write_text("", "utf-8")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "recipe.json").write_text("{}", "utf-8")
    for name, message in (
        ("file", "is a file"), ("others", "holds other files"), ("run", "holds a single run"),
    ):  # fmt: skip
        sweep = sweep_of(recipe, ["--run_dir", str(tmp_path / name)], parse_swept(["seed=1,2"]))
        with pytest.raises(UsageError, match=message):
            train_sweep(sweep, QUIET, ALONE)
    assert (tmp_path / "others" / "thesis.txt").exists()


@pytest.mark.slow
def test_runs_of_a_sweep_are_those_of_train_and_are_compared(
    recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "sweep"
    flags = ("--run_dir", str(folder), "--checkpoint.best_metric", "eval/accuracy")
    words = ("train", str(recipe), *flags, "--sweep", "learner.lr=1e-2,3e-2")
    code, summary = typed(capsys, *words)
    assert code == 0
    assert {run["name"]: run["state"] for run in summary["runs"]} == {
        "lr=1e-2": "finished", "lr=3e-2": "finished",
    }  # fmt: skip
    assert summary == json.loads((folder / "summary.json").read_text("utf-8"))
    assert summary["best"] in ("lr=1e-2", "lr=3e-2")
    assert all(run["low"] <= run["value"] <= run["high"] for run in summary["runs"])

    alone = tmp_path / "alone"
    single = ["train", str(recipe), *flags[2:], "--run_dir", str(alone), "--learner.lr", "3e-2"]
    assert main([*single, "--quiet"]) == 0
    assert fingerprint(alone) == fingerprint(folder / "lr=3e-2")

    times = {path: path.stat().st_mtime_ns for path in folder.glob("lr=*/metrics.jsonl")}
    code, again = typed(capsys, *words[:-1], "learner.lr=1e-2,3e-2,1e-1")
    assert code == 0
    assert len(again["runs"]) == 3
    assert all(path.stat().st_mtime_ns == at for path, at in times.items())

    assert main(["report", str(folder), "--json"]) == 0
    paged = json.loads(capsys.readouterr().out)
    assert Path(paged["report"]) == folder / "report.html"
    page = Path(paged["sweep"]).read_text("utf-8")
    assert "The best runs side by side" in page
    assert all(name in page for name in ("lr=1e-2", "lr=3e-2", "lr=1e-1"))

    opened = postgrad.RunsOfSweep(folder)
    assert set(opened.runs) == {"lr=1e-2", "lr=3e-2", "lr=1e-1"}
    assert opened.best is not None
    assert opened.best.path.name == opened.summary["best"]
    assert opened.best.summary["steps"] == 4


@pytest.mark.slow
def test_a_run_that_fails_does_not_end_the_others(
    recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "sweep"
    swept = "data.path=nowhere.jsonl,reasoning-gym:spell_backward"
    words = ("train", str(recipe), "--run_dir", str(folder), "--sweep", swept)
    code, summary = typed(capsys, *words, "--at-once", "1")
    assert code == 1
    assert [run["state"] for run in summary["runs"]] == ["finished", "failed"]
    assert "nowhere.jsonl: no such file" in summary["runs"][1]["cause"]
    assert "exit code 2" in summary["runs"][1]["cause"]
    assert "nowhere.jsonl: no such file" in (
        (folder / "logs" / "path=nowhere.jsonl.log").read_text("utf-8")
    )
    assert "nowhere.jsonl: no such file" in (folder / "sweep.html").read_text("utf-8")


def start(recipe: Path, folder: Path, *words: str) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "postgrad", "train", str(recipe), "--run_dir", str(folder)]
    swept = ["--sweep", "learner.lr=1e-2,3e-2", "--steps", "20", *words]
    return subprocess.Popen(
        [*command, *swept], stdout=subprocess.PIPE, text=True, start_new_session=True
    )


def wait_for(condition: Callable[[], bool], process: "subprocess.Popen[str]") -> None:
    while not condition():
        assert process.poll() is None, "it ended before"
        time.sleep(0.01)


def has_steps(run: Path, count: int = 2) -> bool:
    log = run / "metrics.jsonl"
    return log.is_file() and len(log.read_bytes().splitlines()) >= count


@pytest.mark.slow
@pytest.mark.parametrize("at_once", [pytest.param(1, marks=pytest.mark.long), 2])
def test_a_sweep_that_was_killed_goes_on_to_the_same_bits(
    recipe: Path, tmp_path: Path, at_once: int
) -> None:
    folder, unbroken = tmp_path / "killed", tmp_path / "unbroken"
    process = start(recipe, folder, "--at-once", str(at_once))
    names = ("lr=1e-2", "lr=3e-2")
    wait_for(lambda: all(has_steps(folder / name) for name in names[:at_once]), process)
    process.kill()
    process.communicate()
    wait_for_locks(folder, names)
    result = resume_sweep(folder, (), QUIET, ALONE)
    assert [run.state for run in result.results] == ["finished", "finished"]
    flags = ["--run_dir", str(unbroken), "--steps", "20"]
    train_sweep(sweep_of(recipe, flags, parse_swept(["learner.lr=1e-2,3e-2"])), QUIET, ALONE)
    for name in names:
        assert fingerprint(folder / name) == fingerprint(unbroken / name)


def wait_for_locks(folder: Path, names: tuple[str, ...]) -> None:
    """The kernel ends the runs with their parent, a moment later."""
    import fcntl

    for name in names:
        if (folder / name).is_dir():
            handle = os.open(folder / name, os.O_RDONLY)
            fcntl.flock(handle, fcntl.LOCK_EX)
            os.close(handle)


@pytest.mark.slow
def test_ctrl_c_lets_the_runs_save_and_starts_no_other(recipe: Path, tmp_path: Path) -> None:
    folder = tmp_path / "sweep"
    process = start(recipe, folder, "--at-once", "1", "--steps", "4000")
    wait_for(lambda: has_steps(folder / "lr=1e-2"), process)
    os.killpg(process.pid, signal.SIGINT)
    printed, _ = process.communicate()
    assert process.returncode == 1
    assert "Ctrl-C: no further run starts, 1 under way save and stop" in printed
    assert not (folder / "lr=3e-2").exists()
    run = folder / "lr=1e-2"
    steps = len((run / "metrics.jsonl").read_bytes().splitlines())
    assert (run / "checkpoints" / "latest").read_text("utf-8").strip() == f"step-{steps:06d}"
    summary = json.loads((folder / "summary.json").read_text("utf-8"))
    assert [entry["state"] for entry in summary["runs"]] == ["stopped", "waiting"]


@pytest.mark.slow
@pytest.mark.long
def test_a_pipeline_is_swept_and_judged_by_its_last_stage(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "sweep"
    small = [
        "--sft.steps", "2", "--data.size", "64", "--eval.size", "8", "--rl.steps", "2",
        "--sft.model.init.hidden_size", "24", "--sft.model.init.num_hidden_layers", "1",
        "--sft.learner.warmup_updates", "0", "--rl.learner.warmup_updates", "0",
        "--rl.batch.rollout_batch_size", "4", "--rl.batch.n_samples_per_prompt", "2",
        "--scoring.workers", "1", "--run_dir", str(folder),
    ]  # fmt: skip
    quickstart = Path(__file__).parents[3] / "recipes" / "quickstart"
    swept = ["--sweep", "rl.learner.lr=1e-4,1e-3"]
    code, summary = typed(capsys, "train", str(quickstart), *small, *swept)
    assert code == 0
    assert summary["metric"] == "eval/accuracy"
    assert {run["name"]: run["steps"] for run in summary["runs"]} == {"lr=1e-4": 2, "lr=1e-3": 2}
    for name in ("lr=1e-4", "lr=1e-3"):
        assert (folder / name / "rl" / "summary.json").is_file()
    result = resume_sweep(folder, (), QUIET, ALONE)
    assert [run.state for run in result.results] == ["finished", "finished"]


@pytest.mark.slow
def test_python_sweeps_a_recipe(recipe: Path, tmp_path: Path) -> None:
    loaded = postgrad.load_recipe(recipe, ["--run_dir", str(tmp_path / "sweep")])
    runs = postgrad.sweep(loaded, {"learner.lr": [0.01, 0.03]}, at_once=2, quiet=True)
    assert set(runs.runs) == {"lr=0.01", "lr=0.03"}
    assert runs.summary["metric"] == "eval/reward"
    assert set(runs.tied) == set(runs.runs) - {runs.summary["best"]}  # it has no interval
    assert runs.best is not None
    assert runs.best.recipe.learner.lr in (0.01, 0.03)
