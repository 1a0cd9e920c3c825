"""Runs that sample while the policy learns, behind Ray: killed, resumed, replayed.

The first kind of run starts a cluster of its own each time, in processes of their own. The others
join one that outlives them: the starts of Ray take longer than all steps of a run that is killed.
More kills are `long`.
"""

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

ray: Any = pytest.importorskip("ray")
pytestmark = [pytest.mark.ranks, pytest.mark.slow, pytest.mark.usefixtures("ray_cluster")]
long = pytest.mark.long
CLUSTER = """
[cluster]
type = "ray"
start_seconds = 900.0
{address}
[cluster.rollout]
workers = {workers}
"""
STEPS = 6


@pytest.fixture
def address(ray_cluster: None) -> str:
    """The recipe's line with the address of a cluster for several runs."""
    return f'address = "{ray.get_runtime_context().gcs_address}"'


def written(to: Path, workers: int, staleness: int, address: str = "") -> Path:
    path = write_recipe("grpo of stale samples", to)
    text = path.read_text("utf-8").replace("max_staleness = 2", f"max_staleness = {staleness}")
    path.write_text(text + CLUSTER.format(workers=workers, address=address), "utf-8")
    return path


def same_bits(recipe: Path, seed: int, kills: int) -> None:
    report = verify_resume(recipe, ["--steps", str(STEPS)], kills, Console("quiet"), seed=seed)
    assert report["kills"] == kills
    same = {"policy.weights.safetensors", "policy.optimizer.safetensors", "pending.safetensors"}
    assert same | {"state.json", "metrics.jsonl", "samples.jsonl"} <= set(report["same"])


@long
def test_a_run_killed_with_its_cluster_ends_with_the_same_bits(tmp_path: Path) -> None:
    same_bits(written(tmp_path, 1, 1), 1, 1)


@long
@pytest.mark.parametrize(("workers", "staleness"), [(2, 1), (2, 2), (1, 2), (2, 4)])
def test_a_run_killed_within_steps_and_saves_ends_with_the_same_bits(
    workers: int, staleness: int, address: str, tmp_path: Path
) -> None:
    same_bits(written(tmp_path, workers, staleness, address), workers, 3)


@pytest.mark.parametrize(
    ("workers", "staleness", "kills"),
    [
        (1, 1, 1),
        pytest.param(2, 2, 2, marks=long),
        pytest.param(2, 4, 2, marks=long),
    ],
)
def test_a_free_run_killed_within_steps_and_saves_has_the_bits_of_a_replay_of_its_schedule(
    workers: int, staleness: int, kills: int, address: str, tmp_path: Path
) -> None:
    recipe = written(tmp_path, workers, staleness, address)
    words = ["--steps", str(STEPS), "--rollout.schedule", "free"]
    report = verify_resume(recipe, words, kills, Console("quiet"), seed=workers)
    assert report["kills"] == kills
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
