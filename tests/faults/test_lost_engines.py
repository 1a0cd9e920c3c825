"""A run whose rollout workers are killed at random moments, again and again, and now and then
stopped, so that they hang: it ends by itself with the samples of an undisturbed run. 5 kills; more
with --fault-points, up to 50.
"""

import json
import os
import signal
import threading
from pathlib import Path
from random import Random
from typing import Any

import pytest

from helpers.runs import lines, timeless
from helpers.tiny_runs import console, make_recipe, reward_on_path
from postgrad.cluster import pulse
from postgrad.observe.console import Console
from postgrad.training.rl import RLJob
from postgrad.training.start import train

__all__ = ["console", "make_recipe", "reward_on_path"]
pytest.importorskip("ray")
pytestmark = [pytest.mark.ranks, pytest.mark.slow, pytest.mark.usefixtures("ray_cluster")]
MOST, EACH = 50, 2  # kills, and how many of them in one step
STOPPED = 5  # one of so many is stopped instead
STILL = 10.0  # seconds after which one that says nothing is looked at
CHANGES: dict[str, Any] = {
    "batch": {"rollout_batch_size": 6, "n_samples_per_prompt": 4},
    "learner": {"lr": 1e-3, "threads": 1},
    "checkpoint": {"save_steps": 100},
    "eval": {"at_start": False, "at_end": False},
    "cluster": {
        "type": "ray",
        "start_seconds": 900.0,
        "max_restarts": MOST,
        "rollout": {"workers": 3},
    },
}


class Killer:
    """Kills rollout workers of a run at random moments of its steps, each process once."""

    def __init__(self, folder: Path, kills: int) -> None:
        self.left = kills
        self.killed: list[int] = []
        self._events = folder / "events.jsonl"
        self._random = Random(kills)
        self._timers: list[threading.Timer] = []

    def begin_step(self) -> None:
        """Waits for the kills of the step before, and plans those of this one."""
        for timer in self._timers:
            timer.join()
        each = min(EACH, self.left)
        self._timers = [
            threading.Timer(self._random.uniform(0.0, 2.0), self._kill) for _ in range(each)
        ]
        self.left -= each
        for timer in self._timers:
            timer.start()

    def _kill(self) -> None:
        while True:
            newest: dict[int, int] = {}
            for event in lines(self._events):
                if event["event"] == "engine_joined":
                    newest[event["engine"]] = event["places"][0][1]
                elif event["event"] == "placed" and event["role"] == "rollout":
                    newest[event["number"]] = event["places"][0][1]
            alive = sorted(set(newest.values()) - set(self.killed))
            if alive:
                self.killed.append(self._random.choice(alive))
                stops = len(self.killed) % STOPPED == 1
                os.kill(self.killed[-1], signal.SIGSTOP if stops else signal.SIGKILL)
                return
            threading.Event().wait(0.2)  # all are being replaced


@pytest.mark.long  # tests/training/test_lost.py kills one before every change
def test_a_run_ends_however_often_its_engines_are_killed(
    make_recipe: Any, console: Console, monkeypatch: pytest.MonkeyPatch, request: Any
) -> None:
    kills = min(MOST, max(5, int(request.config.getoption("--fault-points"))))
    steps = -(-kills // EACH) + 1  # in the last one nobody dies
    quiet, lossy = (make_recipe("rl", n, steps=steps, **CHANGES) for n in ("quiet", "lossy"))
    train(quiet, console)
    killer, step = Killer(Path(lossy.run_dir), kills), RLJob.step

    def disturbed(self: Any, state: Any) -> Any:
        killer.begin_step()
        return step(self, state)

    with monkeypatch.context() as patch:
        patch.setattr(RLJob, "step", disturbed)
        patch.setattr(pulse, "STILL_SECONDS", STILL)
        train(lossy, console)

    folder = Path(lossy.run_dir)
    events = lines(folder / "events.jsonl")
    assert len(set(killer.killed)) == kills
    lost = [event for event in events if event["event"] == "engine_lost"]
    assert len(lost) == kills
    hung = [event for event in lost if "it has not answered, and it uses no" in event["message"]]
    assert len(hung) == -(-kills // STOPPED)
    assert sum(max(e["losses"] for e in lost if e["engine"] == n) for n in range(3)) == kills
    assert "restarted" not in {event["event"] for event in events}
    drawn = sorted((s["ticket"], s["sample"]) for s in lines(folder / "samples.jsonl"))
    assert drawn == [(ticket, sample) for ticket in range(6 * steps) for sample in range(4)]
    for event in lost:
        assert set(event["tickets"]) <= {ticket for ticket, _ in drawn}
    first, second = (timeless(Path(run.run_dir) / "samples.jsonl") for run in (quiet, lossy))
    assert first == second
    assert json.loads((folder / "summary.json").read_text())["steps"] == steps
