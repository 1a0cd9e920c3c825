"""Learning rates of whole runs, and where a run goes on under another schedule."""

from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.runs import lines, tensors
from postgrad.observe.console import Console
from postgrad.training.start import resume, train
from training.test_ppo import PPO


def told(run_dir: str) -> list[str]:
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
    assert told(recipe.run_dir) == [
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
    assert told(constant.run_dir) == told(linear.run_dir) == []


@pytest.mark.slow
def test_more_epochs_are_more_updates_of_the_schedule(make_recipe: Any, console: Console) -> None:
    """40 rows in updates of 8 are five an epoch."""
    learner = {"lr": 1e-2, "schedule": "linear", "threads": 1, "warmup_ratio": 0.2}
    recipe = make_recipe("sft", learner=learner, steps=None, epochs=1)
    train(recipe, console)
    rates = [line["policy/lr"] for line in lines(Path(recipe.run_dir) / "metrics.jsonl")]
    assert rates == pytest.approx([1e-2, 1e-2, 7.5e-3, 5e-3, 2.5e-3])
    resume(Path(recipe.run_dir), ["--epochs", "2"], [], console)
    (line,) = told(recipe.run_dir)
    assert "at update 6, from 0 by the schedule of 5 updates to 0.00625 by that of 10" in line
