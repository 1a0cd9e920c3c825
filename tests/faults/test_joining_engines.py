"""A run that starts with one rollout worker of two: the machine of the other one comes, is lost,
and comes again, while the run goes on.
"""

import json
from collections.abc import Iterator
from concurrent.futures import wait
from pathlib import Path
from typing import Any

import pytest

from helpers.runs import lines
from helpers.tiny_runs import console, make_recipe, reward_on_path
from postgrad.observe.console import Console
from postgrad.training.rl import RLJob
from postgrad.training.start import train

__all__ = ["console", "make_recipe", "reward_on_path"]
ray = pytest.importorskip("ray")
pytestmark = [pytest.mark.ranks, pytest.mark.slow]
STEPS = 6
CHANGES: dict[str, Any] = {
    "steps": STEPS,
    "batch": {"rollout_batch_size": 6, "n_samples_per_prompt": 4},
    # weights that hardly move: tokens of both runs are then equal though logprobs are rounded
    # otherwise where other samples share a batch
    "learner": {"lr": 1e-9, "threads": 1},
    "checkpoint": {"save_steps": 100},
    "eval": {"at_start": False, "at_end": False},
    "sentinels": {"publish": "off"},
    "cluster": {
        "type": "ray",
        "start_seconds": 900.0,
        "rollout": {"workers": 2, "least": 1, "cpus": 1},
    },
}


@pytest.fixture
def machines(own_ray: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A cluster whose first machine has room for one rollout worker."""
    from ray.cluster_utils import Cluster

    monkeypatch.setenv("RAY_worker_niceness", "0")
    cluster = Cluster(initialize_head=True, connect=True, head_node_args={"num_cpus": 2})
    # less than a core is left beside the ranks and a worker
    yield cluster
    ray.shutdown()
    cluster.shutdown()


def test_an_engine_joins_when_its_machine_comes_leaves_with_it_and_comes_back(
    machines: Any, make_recipe: Any, console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    still, moving = (make_recipe("rl", name, **CHANGES) for name in ("still", "moving"))
    train(still, console)
    second: list[Any] = []
    step = RLJob.step

    def comes(job: Any) -> None:
        """There is room for the second worker, and it has been started."""
        engine = job._parts.engine
        worker = engine._members[1]
        if worker.takes_part:  # it was lost, and has to leave before it can join
            assert not wait([worker.starting], 600.0).not_done
            engine._join()
        second.append(machines.add_node(num_cpus=1))
        assert not wait([worker.starting], 600.0).not_done

    def moved(job: Any, state: Any) -> Any:
        if state.step in (1, 4):
            comes(job)
        elif state.step == 3:
            machines.remove_node(second.pop(), allow_graceful=False)
        return step(job, state)

    monkeypatch.setattr(RLJob, "step", moved)
    train(moving, console)

    folder = Path(moving.run_dir)
    engine_events = [event for event in lines(folder / "events.jsonl") if event.get("engine") == 1]
    assert [event["event"] for event in engine_events] == [
        "engine_joined",
        "engine_lost",
        "engine_left",
        "engine_joined",
    ]
    assert [event["serving"] for event in engine_events] == [2, 1, 1, 2]
    assert [event["version"] for event in engine_events if "version" in event] == [2, 5]
    assert engine_events[2]["returns"]
    assert (
        "no machine of the cluster had room for it; it leaves until" in engine_events[2]["message"]
    )
    metrics = lines(folder / "metrics.jsonl")
    assert [metric_line["engine/serving"] for metric_line in metrics] == [1, 1, 2, 1, 1, 2]
    kinds = {event["event"] for event in lines(folder / "events.jsonl")}
    assert "restarted" not in kinds
    samples = lines(folder / "samples.jsonl")
    drawn = sorted((sample["ticket"], sample["sample"]) for sample in samples)
    assert drawn == [(ticket, sample) for ticket in range(6 * STEPS) for sample in range(4)]
    assert json.loads((folder / "summary.json").read_text())["steps"] == STEPS
    expected = lines(Path(still.run_dir) / "samples.jsonl")
    assert [sample["turns"][0]["token_ids"] for sample in samples] == [
        sample["turns"][0]["token_ids"] for sample in expected
    ]
