"""Runs with samples ahead: the same bits after any resume, and from their recorded samples."""

import errno
import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from helpers.runs import lines
from helpers.tiny_runs import MakeRecipe
from postgrad.checkpoint.files import PENDING
from postgrad.checkpoint.store import SaveFailed
from postgrad.observe.console import Console
from postgrad.plan.simulate import BatchLoad, Pace, Simulation
from postgrad.recipe.recipe import Recipe
from postgrad.tools.verify_resume import fingerprint
from postgrad.training.start import train

STALE: dict[str, Any] = {
    "steps": 5,
    "rollout": {"max_staleness": 2, "slots": 5, "max_new_tokens": 6},
    "algorithm": {"correction": "tis"},
}


def in_pieces(make_recipe: MakeRecipe, **changes: Any) -> dict[str, str]:
    """The fingerprint of a run that is resumed after every step."""
    for steps in range(1, STALE["steps"] + 1):
        recipe = make_recipe("rl", "pieces", **{**STALE, **changes, "steps": steps})
        train(recipe, Console("quiet"))
    return without_evaluations(recipe)


def without_evaluations(recipe: Recipe) -> dict[str, str]:
    """The pieces end with an evaluation each, the whole run with one."""
    hashes = fingerprint(Path(recipe.run_dir))
    left_out = ("eval.jsonl", "eval_samples.jsonl", "state.json")
    return {name: value for name, value in hashes.items() if name not in left_out}


@pytest.mark.slow
@pytest.mark.parametrize(
    "algorithm",
    [
        {
            "correction": "tis",
            "correction_normalised": True,
            "rejection": {"any_token": [0.5, 2.0]},
        },
        {"correction": "off", "old_logprobs": "sampled", "rejection": {"mean_k3": 0.1}},
        {"correction": "off", "old_logprobs": "sampled", "clip_low": 1.0, "second_moment": 1e-3},
    ],
)
def test_a_run_that_is_resumed_after_every_step_has_the_same_bits(
    algorithm: dict[str, Any], make_recipe: MakeRecipe, trained: MakeRecipe
) -> None:
    changes = {**STALE, "algorithm": algorithm}
    uninterrupted = trained("rl", **changes)
    hashes = without_evaluations(uninterrupted)
    assert {"pending.safetensors", "policy.weights.safetensors", "samples.jsonl"} <= set(hashes)
    assert in_pieces(make_recipe, algorithm=algorithm) == hashes


def test_samples_are_of_several_versions_none_too_old_and_tickets_are_in_order(
    trained: MakeRecipe,
) -> None:
    run = Path(trained("rl", **STALE).run_dir)
    lines = [json.loads(line) for line in (run / "samples.jsonl").open(encoding="utf-8")]
    ages = {line["step"] - 1 - v for line in lines for v, _ in line["policy_version"]}
    assert {0, 1} <= ages <= {0, 1, 2}
    assert any(len(line["policy_version"]) > 1 for line in lines)
    assert [line["ticket"] for line in lines[::4]] == list(range(20))
    metrics = [json.loads(line) for line in (run / "metrics.jsonl").open(encoding="utf-8")]
    assert metrics[0]["staleness/max"] == 0
    assert max(line["staleness/max"] for line in metrics) == max(ages)
    assert any("sentinel/drift" in line for line in metrics)
    assert all(line["ahead/groups"] == 8 for line in metrics)


@pytest.mark.slow
def test_a_run_leaves_as_many_rows_empty_as_the_simulation_of_its_answers(
    trained: MakeRecipe,
) -> None:
    """Until the steps that sample tickets which nothing has trained on."""
    slots, name = 40, "idle/empty_rows_fraction"
    rollout = {"max_staleness": 1, "slots": slots, "max_new_tokens": 24}
    run = Path(trained("rl", **{**STALE, "rollout": rollout, "data": {"max_len": 64}}).run_dir)
    samples = [json.loads(line) for line in (run / "samples.jsonl").open(encoding="utf-8")]
    lengths = {
        (line["ticket"], line["sample"]): sum(len(turn["token_ids"]) for turn in line["turns"])
        for line in samples
    }
    assert len(set(lengths.values())) > 3
    metrics = [json.loads(line) for line in (run / "metrics.jsonl").open(encoding="utf-8")]
    load = BatchLoad(4, 4, 0, lambda ticket, sample: lengths.get((ticket, sample), 1))
    pace = Pace(
        slots, math.inf, lambda rows, cached: 1.0, lambda tokens: 0.0, lambda tokens: 1.0, 0.0
    )
    for step in (2, 3, 4):
        simulated = Simulation(load, pace, 1, 1, apart=False).run(step, step - 1)
        assert metrics[step - 1].get(name, 0.0) == pytest.approx(simulated.empty_rows)
        assert 0.0 < metrics[step - 1].get("idle/learner_time_fraction", 0.5) < 1.0
    assert max(line.get(name, 0.0) for line in metrics) > 0.1


@pytest.mark.slow
def test_its_samples_replayed_make_the_same_weights(
    make_recipe: MakeRecipe, trained: MakeRecipe
) -> None:
    source_run = trained("rl", **STALE)
    rollout = {**STALE["rollout"], "source": "replay", "replay_path": source_run.run_dir}
    again = make_recipe("rl", "replayed", **{**STALE, "rollout": rollout})
    train(again, Console("quiet"))
    first, second = fingerprint(Path(source_run.run_dir)), fingerprint(Path(again.run_dir))
    for name in ("policy.weights.safetensors", "policy.optimizer.safetensors"):
        assert first[name] == second[name]


def full_disk(number: int, last: int) -> Callable[[Path, bytes], int]:
    """In place of Path.write_bytes: half of the samples ahead has room in their saves first..last,
    counted from 1.
    """
    write, saves = Path.write_bytes, iter(range(1, 1000))

    def half(path: Path, data: bytes) -> int:
        if path.name == PENDING and number <= next(saves) <= last:
            write(path, data[: len(data) // 2])
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        return write(path, data)

    return half


@pytest.mark.slow
@pytest.mark.parametrize("last", [2, 1000], ids=["for a while", "for good"])
def test_a_disk_that_is_full_at_the_cut_loses_no_ticket(
    last: int, make_recipe: MakeRecipe, trained: MakeRecipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where it stays full the run fails at its end, and goes on from the samples of step 1."""
    wanted = fingerprint(Path(trained("rl", **STALE).run_dir))
    recipe = make_recipe("rl", **STALE, checkpoint={"wait_for_room_minutes": 0})
    run = Path(recipe.run_dir)
    disk_message = (
        "no checkpoint of step {} could be saved in " + str(run / "checkpoints") + ": "
        "the disk is full; older checkpoints are kept; make room"
    )
    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_bytes", full_disk(2, last))
        if last == 2:
            train(recipe, Console("quiet"))
        else:
            with pytest.raises(SaveFailed) as failed:
                train(recipe, Console("quiet"))
            assert disk_message.format(5) in str(failed.value)
            checkpoints = sorted(path.name for path in (run / "checkpoints").iterdir())
            assert checkpoints == ["latest", "step-000001"]
    events = [line for line in lines(run / "events.jsonl") if line["event"] == "save_failed"]
    steps = [2] if last == 2 else [2, 3, 4]
    assert [(line["step"], line["message"]) for line in events] == [
        (step, disk_message.format(step)) for step in steps
    ]
    train(recipe, Console("quiet"))
    assert fingerprint(run) == wanted
    drawn = [(line["ticket"], line["sample"]) for line in lines(run / "samples.jsonl")]
    assert drawn == [(ticket, sample) for ticket in range(20) for sample in range(4)]


@pytest.mark.slow
def test_a_verifier_that_hangs_is_a_failure_of_its_ticket_and_the_run_goes_on(
    make_recipe: MakeRecipe, trained: MakeRecipe
) -> None:
    """It hangs on sample 2 of ticket 5, which step 2 trains on and step 1 has begun."""
    calm = lines(Path(trained("rl", **STALE).run_dir) / "samples.jsonl")
    row = next(line["row"] for line in calm if line["ticket"] == 5)
    reward = {"type": "tiny_rewards:hangs", "row": row, "sample": 2, "wall_seconds": 0.3}
    recipe = make_recipe("rl", **STALE, rewards=[{**reward, "name": "slow"}])
    assert train(recipe, Console("quiet"))["steps"] == 5
    run = Path(recipe.run_dir)
    failed = [line for line in lines(run / "events.jsonl") if line["event"] == "verifier_failed"]
    places = [tuple(line[key] for key in ("step", "ticket", "sample", "cause")) for line in failed]
    assert places == [(2, 5, 2, "wall_clock")]
    assert failed[0]["component"] == "slow"
    assert failed[0]["message"] == "lasted more than 0.3 s of wall-clock time"
    samples = lines(run / "samples.jsonl")
    drawn = [(line["ticket"], line["sample"]) for line in samples]
    assert drawn == [(ticket, sample) for ticket in range(20) for sample in range(4)]
    scored = {key for key, line in zip(drawn, samples, strict=True) if line["total"] is not None}
    assert set(drawn) - scored == {(5, 2)}
    for line, other in zip(samples[:32], calm[:32], strict=True):  # the weights are the same so far
        assert line["turns"] == other["turns"]
        if (line["ticket"], line["sample"]) != (5, 2):
            assert line["total"] == other["total"]
