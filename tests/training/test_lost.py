"""Ranks and rollout workers that are killed: the run goes on by itself, to the same bits."""

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.runs import lines, timeless
from postgrad.checkpoint.settings import CheckpointSettings
from postgrad.checkpoint.store import CheckpointStore
from postgrad.observe.console import Console
from postgrad.recipe.recipe import Recipe
from postgrad.training.rl import RLJob
from postgrad.training.start import train

pytest.importorskip("ray")
pytestmark = [pytest.mark.ranks, pytest.mark.slow, pytest.mark.usefixtures("ray_cluster")]

STEPS = 6
CHANGES: dict[str, Any] = {
    "steps": STEPS,
    "learner": {"ranks": 2, "sharding": "zero3"},
    "checkpoint": {"save_steps": 2, "max_ckpt_num": 9},
    "cluster": {"type": "ray", "start_seconds": 600.0, "rollout": {"workers": 2}},
}


def kill_at(patch: pytest.MonkeyPatch, victims: dict[int, tuple[str, int]]) -> None:
    """Before the step after each of these, for the first time, that process of a role is killed."""
    original_step, left = RLJob.step, dict(victims)

    def step(self: Any, state: Any) -> Any:
        if state.step in left:
            role, number = left.pop(state.step)
            events = lines(self._run.directory.path / "events.jsonl")
            placed = [
                event for event in events if event["event"] == "placed" and event["role"] == role
            ]
            if role == "rollout":  # one event for each
                placed, number = [event for event in placed if event["number"] == number], 0
            os.kill(placed[-1]["places"][number][1], signal.SIGKILL)
        return original_step(self, state)

    patch.setattr(RLJob, "step", step)


def without_engines(path: Path) -> list[dict[str, Any]]:
    """Lines without what each engine did: one that is replaced repeats some."""
    return [
        {key: value for key, value in line.items() if not key.startswith(("engine/", "idle/"))}
        for line in timeless(path)
    ]


def checkpoint(recipe: Recipe) -> Any:
    return CheckpointStore(Path(recipe.run_dir) / "checkpoints", CheckpointSettings()).load(STEPS)


def test_a_killed_rank_and_a_killed_engine_change_no_bit_and_lose_no_ticket(
    make_recipe: Any, console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    undisturbed, lost = (make_recipe("rl", name, **CHANGES) for name in ("whole", "lost"))
    train(undisturbed, console)
    with monkeypatch.context() as patch:
        kill_at(patch, {3: ("policy", 1), 5: ("rollout", 0)})
        train(lost, console)

    events = lines(Path(lost.run_dir) / "events.jsonl")
    restarts = [event for event in events if event["event"] == "restarted"]
    assert [event["step"] for event in restarts] == [2]
    assert restarts[0]["message"].startswith("rank 1 died: ")
    placed = [event for event in events if event["event"] == "placed"]
    workers = [event["places"] for event in placed if event["role"] == "rollout"]
    assert workers[2:4] == workers[:2]  # they outlive the ranks, and are named again
    (replaced,) = [event for event in events if event["event"] == "engine_lost"]
    assert replaced["message"].startswith("rollout worker 0 died: ")
    assert [event["engine"] for event in events if event["event"] == "engine_joined"] == [0]

    full_checkpoint, lost_checkpoint = checkpoint(undisturbed), checkpoint(lost)
    assert full_checkpoint.stems == lost_checkpoint.stems
    for stem in full_checkpoint.stems:
        a, b = full_checkpoint.tensors(stem), lost_checkpoint.tensors(stem)
        assert all(torch.equal(a[name], b[name]) for name in a)
    assert full_checkpoint.state.cursor == lost_checkpoint.state.cursor
    for file in ("metrics.jsonl", "eval.jsonl", "samples.jsonl"):
        expected_lines, lost_lines = (
            without_engines(Path(run.run_dir) / file) for run in (undisturbed, lost)
        )
        assert expected_lines == lost_lines
    drawn = [
        (line["ticket"], line["sample"]) for line in lines(Path(lost.run_dir) / "samples.jsonl")
    ]
    assert sorted(drawn) == [(ticket, sample) for ticket in range(4 * STEPS) for sample in range(4)]
    assert json.loads((Path(lost.run_dir) / "summary.json").read_text())["steps"] == STEPS
