"""Learning rates of whole runs, and where a run goes on under another schedule."""

from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.runs import assert_same_run, lines, tensors, train_until_killed
from postgrad.observe.console import Console
from postgrad.training.sft import SFTJob
from postgrad.training.start import resume, train
from training.test_ppo import PPO


def schedule_events(run_dir: str) -> list[str]:
    events = lines(Path(run_dir) / "events.jsonl")
    return [line["message"] for line in events if line["event"] == "learning_rate"]


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_a_run_of_one_update_moves_the_weights(
    schedule: str, make_recipe: Any, console: Console
) -> None:
    learner = {"lr": 1e-2, "threads": 1, "schedule": schedule}
    recipe = make_recipe("sft", learner=learner, steps=1, eval={"at_start": False})
    train(recipe, console)
    assert lines(Path(recipe.run_dir) / "metrics.jsonl")[0]["policy/lr"] == 1e-2
    moved = tensors(recipe.run_dir, 1)["policy.optimizer/model.norm.weight.exp_avg"]
    assert torch.any(moved != 0)


@pytest.mark.slow
def test_a_longer_resume_tells_how_each_rate_jumps(make_recipe: Any, console: Console) -> None:
    """Three steps of two updates, one of them the critic's alone: four of the policy, six of the
    critic. With four steps they are six and eight.
    """
    algorithm = {**PPO["algorithm"], "critic_warmup_steps": 1}
    learner = {"lr": 1e-2, "schedule": "linear", "threads": 1}
    recipe = make_recipe("rl", **{**PPO, "algorithm": algorithm}, learner=learner)
    train(recipe, console)
    resume(Path(recipe.run_dir), ["--steps", "4"], [], console)
    assert schedule_events(recipe.run_dir) == [
        "policy: the learning rate jumps at update 5, from 0 by the schedule of 4 updates to "
        "0.003333 by that of 6",
        "critic: the learning rate jumps at update 7, from 0 by the schedule of 6 updates to "
        "0.005 by that of 8",
    ]
    last = lines(Path(recipe.run_dir) / "metrics.jsonl")[-1]
    assert last["policy/lr"] == pytest.approx(1e-2 / 6)  # of the step's second update


@pytest.mark.slow
def test_a_resume_on_the_same_schedule_tells_of_no_jump(make_recipe: Any, console: Console) -> None:
    constant = make_recipe("sft", "constant")
    train(constant, console)
    resume(Path(constant.run_dir), ["--steps", "4"], [], console)
    learner = {"lr": 1e-2, "schedule": "linear", "threads": 1}
    linear = make_recipe("sft", "linear", learner=learner, checkpoint={"save_steps": 1})
    train(linear, console)
    resume(Path(linear.run_dir), [], [], console)
    assert schedule_events(constant.run_dir) == schedule_events(linear.run_dir) == []


def _rates(run_dir: str) -> list[float]:
    return [line["policy/lr"] for line in lines(Path(run_dir) / "metrics.jsonl")]


def test_a_resume_in_the_decay_is_the_run_that_was_not_interrupted(
    make_recipe: Any, console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    learner = {"lr": 1e-2, "schedule": "1-sqrt", "threads": 1, "decay_ratio": 0.6}
    same = {"learner": learner, "steps": 5, "checkpoint": {"save_steps": 1}}
    uninterrupted, killed = (
        make_recipe("sft", "whole", **same),
        make_recipe("sft", "killed", **same),
    )
    train(uninterrupted, console)
    train_until_killed(monkeypatch, SFTJob, 3, killed, console)
    resume(Path(killed.run_dir), [], [], console)
    assert_same_run(uninterrupted, killed, 5)
    falling = [1e-2 * (1 - (n / 3) ** 0.5) for n in range(3)]
    assert _rates(killed.run_dir) == pytest.approx([1e-2, 1e-2, *falling])
    assert schedule_events(killed.run_dir) == []


def test_a_longer_resume_in_the_decay_goes_back_to_the_whole_rate(
    make_recipe: Any, console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four updates, the last two of them falling; with eight it is the last two of those. A resume
    before the decay of both has no jump.
    """
    learner = {"lr": 1e-2, "schedule": "linear", "threads": 1, "decay_updates": 2}
    same = {"learner": learner, "checkpoint": {"save_steps": 1}}
    recipe = make_recipe("sft", steps=4, **same)
    train(recipe, console)
    assert _rates(recipe.run_dir) == pytest.approx([1e-2, 1e-2, 1e-2, 5e-3])
    resume(Path(recipe.run_dir), ["--steps", "8"], [], console)
    assert _rates(recipe.run_dir)[4:] == pytest.approx([1e-2, 1e-2, 1e-2, 5e-3])
    assert schedule_events(recipe.run_dir) == [
        "policy: the learning rate jumps at update 5, from 0 by the schedule of 4 updates to "
        "0.01 by that of 8",
    ]
    stable = make_recipe("sft", "stable", steps=6, **same)
    train_until_killed(monkeypatch, SFTJob, 2, stable, console)
    resume(Path(stable.run_dir), ["--steps", "4"], [], console)
    assert _rates(stable.run_dir) == pytest.approx([1e-2, 1e-2, 1e-2, 5e-3])
    assert schedule_events(stable.run_dir) == []


@pytest.mark.slow
def test_more_epochs_are_more_updates_of_the_schedule(make_recipe: Any, console: Console) -> None:
    """40 rows in updates of 8 are five an epoch."""
    learner = {"lr": 1e-2, "schedule": "linear", "threads": 1, "warmup_ratio": 0.2}
    recipe = make_recipe("sft", learner=learner, steps=None, epochs=1)
    train(recipe, console)
    rates = [line["policy/lr"] for line in lines(Path(recipe.run_dir) / "metrics.jsonl")]
    assert rates == pytest.approx([1e-2, 1e-2, 7.5e-3, 5e-3, 2.5e-3])
    resume(Path(recipe.run_dir), ["--epochs", "2"], [], console)
    (line,) = schedule_events(recipe.run_dir)
    assert "at update 6, from 0 by the schedule of 5 updates to 0.00625 by that of 10" in line
