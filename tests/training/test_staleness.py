"""Runs with samples ahead: the same bits after any resume, and from their recorded samples."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from helpers.tiny_runs import MakeRecipe
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


@pytest.mark.parametrize(
    "algorithm", [{"correction": "tis"}, {"correction": "off", "old_logprobs": "sampled"}]
)
def test_a_run_that_is_resumed_after_every_step_has_the_same_bits(
    algorithm: dict[str, Any], make_recipe: MakeRecipe, trained: MakeRecipe
) -> None:
    changes = {**STALE, "algorithm": algorithm}
    whole = trained("rl", **changes)
    hashes = without_evaluations(whole)
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


def test_its_samples_replayed_make_the_same_weights(
    make_recipe: MakeRecipe, trained: MakeRecipe
) -> None:
    whole = trained("rl", **STALE)
    rollout = {**STALE["rollout"], "source": "replay", "replay_path": whole.run_dir}
    again = make_recipe("rl", "replayed", **{**STALE, "rollout": rollout})
    train(again, Console("quiet"))
    first, second = fingerprint(Path(whole.run_dir)), fingerprint(Path(again.run_dir))
    for name in ("policy.weights.safetensors", "policy.optimizer.safetensors"):
        assert first[name] == second[name]
