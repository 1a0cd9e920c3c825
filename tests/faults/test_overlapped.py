"""Runs that sample while the policy learns, behind Ray: killed, resumed, replayed."""

from pathlib import Path
from typing import Any

import pytest

from helpers.jobs import write_recipe
from helpers.runs import lines
from helpers.tiny_runs import console, make_recipe, reward_on_path
from postgrad.observe.console import Console
from postgrad.tools.verify_resume import fingerprint, verify_resume
from postgrad.training.start import train

__all__ = ["console", "make_recipe", "reward_on_path"]

pytest.importorskip("ray")
pytestmark = [pytest.mark.ranks, pytest.mark.slow]
CLUSTER = """
[cluster]
type = "ray"
start_seconds = 900.0
[cluster.rollout]
workers = {workers}
"""
STEPS = 6


def written(to: Path, workers: int, staleness: int) -> Path:
    path = write_recipe("grpo of stale samples", to)
    text = path.read_text("utf-8").replace("max_staleness = 2", f"max_staleness = {staleness}")
    path.write_text(text + CLUSTER.format(workers=workers), "utf-8")
    return path


@pytest.mark.parametrize(("workers", "staleness"), [(1, 1), (2, 2), (2, 1), (1, 2)])
def test_a_run_killed_within_steps_and_saves_ends_with_the_same_bits(
    workers: int, staleness: int, tmp_path: Path
) -> None:
    recipe = written(tmp_path, workers, staleness)
    report = verify_resume(recipe, ["--steps", str(STEPS)], 3, Console("quiet"), seed=workers)
    assert report["kills"] == 3
    same = {"policy.weights.safetensors", "policy.optimizer.safetensors", "pending.safetensors"}
    assert same | {"state.json", "metrics.jsonl", "samples.jsonl"} <= set(report["same"])


@pytest.mark.parametrize(("workers", "staleness"), [(2, 2), (1, 1)])
def test_a_free_run_killed_within_steps_and_saves_has_the_bits_of_a_replay_of_its_schedule(
    workers: int, staleness: int, tmp_path: Path
) -> None:
    recipe = written(tmp_path, workers, staleness)
    words = ["--steps", str(STEPS), "--rollout.schedule", "free"]
    report = verify_resume(recipe, words, 2, Console("quiet"), seed=workers)
    assert report["kills"] == 2
    same = {"policy.weights.safetensors", "policy.optimizer.safetensors", "pending.safetensors"}
    assert same | {"state.json", "samples.jsonl", "schedule.jsonl"} <= set(report["same"])


def test_samples_are_one_version_behind_and_replayed_make_the_same_weights(
    make_recipe: Any, console: Console
) -> None:
    rollout = {"max_staleness": 1, "slots": 5, "max_new_tokens": 6}
    changes: dict[str, Any] = {
        "steps": 4,
        "algorithm": {"correction": "tis"},
        "cluster": {"type": "ray", "start_seconds": 900.0, "rollout": {"workers": 2}},
    }
    recipe = make_recipe("rl", "run", rollout=rollout, **changes)
    train(recipe, console)
    run = Path(recipe.run_dir)
    samples, metrics = lines(run / "samples.jsonl"), lines(run / "metrics.jsonl")
    drawn = sorted((sample["ticket"], sample["sample"]) for sample in samples)
    assert drawn == [(ticket, sample) for ticket in range(16) for sample in range(4)]
    for sample in samples:
        (span,) = sample["policy_version"]
        assert span[0] == max(0, sample["step"] - 2)
    assert [line["ahead/ended_groups"] for line in metrics] == [4.0, 4.0, 4.0, 0.0]
    assert all(line["overlap/sample_seconds"] > 0.0 for line in metrics[:-1])
    rollout = {**rollout, "source": "replay", "replay_path": recipe.run_dir}
    again = make_recipe("rl", "replayed", rollout=rollout, **changes)
    train(again, console)
    first, second = fingerprint(run), fingerprint(Path(again.run_dir))
    for name in ("policy.weights.safetensors", "policy.optimizer.safetensors"):
        assert first[name] == second[name]
