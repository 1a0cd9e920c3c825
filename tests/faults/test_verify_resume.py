"""`postgrad verify-resume`: a real process, killed with all it started, ends with the same bits."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from helpers.jobs import write_recipe
from postgrad.core.errors import RunError, UsageError
from postgrad.observe.console import Console
from postgrad.tools import verify_resume as module
from postgrad.tools.verify_resume import verify_resume


@pytest.mark.slow
@pytest.mark.parametrize(
    "job",
    [
        pytest.param("sft", marks=pytest.mark.long),
        pytest.param("grpo with kl and ema", marks=pytest.mark.long),
        "grpo of stale samples",
    ],
)
def test_a_run_killed_within_steps_and_saves_ends_with_the_same_bits(
    job: str, tmp_path: Path
) -> None:
    recipe = write_recipe(job, tmp_path)
    report = verify_resume(recipe, ["--steps", "5"], 3, Console("quiet"), seed=len(job))
    assert report["kills"] == 3
    assert {"policy.weights.safetensors", "policy.optimizer.safetensors"} <= set(report["same"])
    assert {"state.json", "metrics.jsonl", "eval.jsonl"} <= set(report["same"])
    assert ("policy.ema.safetensors" in report["same"]) == ("ema" in job)


def test_more_kills_than_steps_are_refused(tmp_path: Path) -> None:
    lines = "".join(f'{{"step": {step}, "train_seconds": 2.0}}\n' for step in (1, 2, 3))
    (tmp_path / "metrics.jsonl").write_text(lines)
    with pytest.raises(UsageError, match=r"--kills 3: the run has 3 steps.* take --steps 4"):
        module._planned(tmp_path, 3, seed=0)


def test_kills_lie_at_steps_of_their_own_and_every_second_one_in_a_save(tmp_path: Path) -> None:
    lines = "".join(f'{{"step": {step}, "train_seconds": 2.0}}\n' for step in range(1, 9))
    (tmp_path / "metrics.jsonl").write_text(lines)
    for seed in range(20):
        kills = module._planned(tmp_path, 7, seed)
        assert [kill.step for kill in kills] == [1, 2, 3, 4, 5, 6, 7]
        assert [kill.seconds is None for kill in kills] == [False, True] * 3 + [False]
        assert all(0 <= kill.seconds < 2 for kill in kills if kill.seconds is not None)


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The commands of all copies that were started; each ends at once, without a run."""
    started: list[list[str]] = []

    def start(command: list[str], **options: Any) -> "subprocess.Popen[str]":
        started.append(command)
        return subprocess.Popen([sys.executable, "-c", ""], **options)

    monkeypatch.setattr(
        module, "subprocess", SimpleNamespace(**{**vars(subprocess), "Popen": start})
    )
    return started


@pytest.mark.usefixtures("copies")
def test_a_run_that_ends_before_a_kill_is_an_error(tmp_path: Path) -> None:
    kills = [module.Kill(1, None)]
    with pytest.raises(RunError, match="ended before kill 1 of 1"):
        module._run_with_kills(tmp_path, tmp_path, [], kills, Console("quiet"))


def test_copies_write_no_checkpoints_curves_or_models_of_the_run(
    tmp_path: Path, copies: list[list[str]]
) -> None:
    words = ["--checkpoint.ckpt_path", "/of/the/run", "--observe.loggers", '["wandb"]']
    words += ["--checkpoint.push_to_hub", "me/mine", "--run_dir", "/of/the/run"]
    module._run_to_end(tmp_path, tmp_path / "copy", words)
    flags = copies[0][copies[0].index("train") + 3 :]
    last = dict(zip(flags[::2], flags[1::2], strict=True))
    assert last["--checkpoint.ckpt_path"] == str(tmp_path / "copy" / "checkpoints")
    assert last["--run_dir"] == str(tmp_path / "copy")
    assert last["--observe.loggers"] == "[]"
    assert last["--checkpoint.push_to_hub"] == ""


@pytest.mark.slow
def test_an_interrupted_check_ends_its_copy_and_removes_its_folder(tmp_path: Path) -> None:
    recipe, copies = write_recipe("sft", tmp_path), tmp_path / "copies"
    copies.mkdir()
    command = [sys.executable, "-m", "postgrad", "verify-resume", str(recipe), "--steps", "100000"]
    with subprocess.Popen(
        command, env={**os.environ, "TMPDIR": str(copies)}, stderr=subprocess.PIPE, text=True
    ) as process:
        while not list(copies.glob("*/whole/checkpoints/step-*")):
            assert process.poll() is None
            time.sleep(0.05)
        children = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate()
    assert process.returncode == 1
    assert errors.strip().splitlines()[-1] == "postgrad: interrupted"
    assert children
    assert not psutil.wait_procs(children, timeout=60)[1]
    assert not list(copies.glob("postgrad-*"))


def test_a_run_that_says_it_is_not_exact_is_told_with_its_reason(tmp_path: Path) -> None:
    events = tmp_path / "events.jsonl"
    events.write_text('{"event": "started", "message": "step 0"}\n')
    assert module._not_exact(tmp_path) is None
    with events.open("a") as file:
        file.write('{"event": "not_exact", "message": "the environment is not deterministic"}\n')
    assert module._not_exact(tmp_path) == "the environment is not deterministic"


def test_the_killed_run_takes_what_the_first_one_has_chosen(
    tmp_path: Path, copies: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_planned", lambda run, kills, seed: [])
    monkeypatch.setattr(module, "_is_free", lambda run: False)
    monkeypatch.setattr(module, "fingerprint", lambda run: {})
    verify_resume(tmp_path / "recipe.toml", [], 1, Console("quiet"))
    first, killed = copies
    assert "--choices-of" not in first
    run_dir = first[first.index("--run_dir") + 1]
    assert killed[killed.index("--choices-of") + 1] == run_dir
