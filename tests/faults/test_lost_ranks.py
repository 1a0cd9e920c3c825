"""A run that loses a rank in the middle of a step: its rollout workers wait for the new ranks, and
it ends with the samples and weights of a run that lost nothing.
"""

import os
import signal
from pathlib import Path
from typing import Any

import psutil
import pytest

from helpers.runs import lines, timeless
from helpers.tiny_runs import console, make_recipe, reward_on_path
from postgrad.observe.console import Console
from postgrad.tools.verify_resume import fingerprint
from postgrad.training.rl import RLJob
from postgrad.training.start import train

__all__ = ["console", "make_recipe", "reward_on_path"]
pytest.importorskip("ray")
pytestmark = [pytest.mark.ranks, pytest.mark.slow, pytest.mark.long]
CHANGES: dict[str, Any] = {
    "steps": 4,
    "batch": {"rollout_batch_size": 6, "n_samples_per_prompt": 4},
    "learner": {"lr": 1e-2, "threads": 1, "ranks": 2, "sharding": "zero3"},
    "checkpoint": {"save_steps": 2},
    "eval": {"at_start": False, "at_end": False},
    "cluster": {"type": "ray", "start_seconds": 900.0, "rollout": {"workers": 2}},
}


def places(events: list[dict[str, Any]], role: str) -> list[list[int]]:
    """The process ids of a role, of each time that its processes were placed."""
    placements = [event for event in events if event["event"] == "placed" and event["role"] == role]
    return [[pid for _, pid in event["places"]] for event in placements]


def test_rollout_workers_outlive_a_rank_that_dies_in_a_step(
    make_recipe: Any, console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    quiet, lossy = (make_recipe("rl", name, **CHANGES) for name in ("quiet", "lossy"))
    train(quiet, console)
    folder, sample, update = Path(lossy.run_dir), RLJob._sample, RLJob._update
    killed: list[int] = []
    alive: list[bool] = []

    def kill() -> None:
        ranks = places(lines(folder / "events.jsonl"), "policy")[-1]
        os.kill(ranks[1], signal.SIGKILL)
        killed.append(ranks[1])

    def sampled(self: Any, state: Any) -> Any:
        if state.step == 3 and len(killed) == 1:  # the second time: nothing was saved since
            kill()
        return sample(self, state)

    def updated(self: Any, *arguments: Any) -> Any:
        if arguments[1].step == 3 and not killed:
            kill()
        workers = places(lines(folder / "events.jsonl"), "rollout")
        alive.append(all(psutil.pid_exists(pid) for (pid,) in workers))
        return update(self, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(RLJob, "_sample", sampled)
        patch.setattr(RLJob, "_update", updated)
        train(lossy, console)

    events = lines(folder / "events.jsonl")
    kinds = [event["event"] for event in events]
    assert len(set(killed)) == kinds.count("restarted") == 2
    assert "engine_lost" not in kinds
    workers = places(events, "rollout")
    assert workers == workers[:2] * 3  # placed once, and named again at each restart
    assert all(alive)
    assert len({rank for ranks in places(events, "policy") for rank in ranks}) == 6
    first, second = (timeless(Path(run.run_dir) / "samples.jsonl") for run in (quiet, lossy))
    assert first == second
    undisturbed, again = (fingerprint(Path(run.run_dir)) for run in (quiet, lossy))
    tensors = {name for name in undisturbed if name.endswith(".safetensors")}
    assert len(tensors) == 4  # weights and moments of both ranks
    assert {name: again[name] for name in tensors} == {name: undisturbed[name] for name in tensors}
