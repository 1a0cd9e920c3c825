"""`postgrad verify-resume`: a real process, killed with all it started, ends with the same bits."""

import subprocess
import sys
from pathlib import Path

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


def test_a_run_that_ends_before_a_kill_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ended(recipe: Path, run: Path, words: list[str]) -> subprocess.Popen[str]:
        return subprocess.Popen([sys.executable, "-c", ""], stderr=subprocess.PIPE, text=True)

    monkeypatch.setattr(module, "_start", ended)
    kills = [module.Kill(1, None)]
    with pytest.raises(RunError, match="ended before kill 1 of 1"):
        module._run_with_kills(tmp_path, tmp_path, [], kills, Console("quiet"))


def test_a_run_that_says_it_is_not_exact_is_told_with_its_reason(tmp_path: Path) -> None:
    events = tmp_path / "events.jsonl"
    events.write_text('{"event": "started", "message": "step 0"}\n')
    assert module._not_exact(tmp_path) is None
    with events.open("a") as file:
        file.write('{"event": "not_exact", "message": "the environment is not deterministic"}\n')
    assert module._not_exact(tmp_path) == "the environment is not deterministic"
