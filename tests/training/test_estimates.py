"""What was estimated stands beside what was measured: plan.json, metrics.jsonl, summary.json."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from helpers.runs import lines
from helpers.tiny_runs import MakeRecipe
from postgrad.core.errors import UsageError
from postgrad.observe.console import Console
from postgrad.plan.hardware import parse_hardware
from postgrad.training import estimates
from postgrad.training.start import resume, train

PHASES = {"sft": ["train"], "rl": ["sample", "train", "train/columns", "train/update"]}


def plans(run_dir: str) -> list[dict[str, Any]]:
    return json.loads((Path(run_dir) / "plan.json").read_text("utf-8"))["plans"]


@pytest.mark.parametrize("job", ["sft", "rl"])
def test_every_step_says_what_was_estimated_of_each_phase_and_what_was_measured(
    make_recipe: MakeRecipe, console: Console, job: str
) -> None:
    more = {"algorithm": {"type": "grpo", "kl_coef": 0.1}} if job == "rl" else {}
    recipe = make_recipe(job, **more)
    summary = train(recipe, console)
    (plan,) = plans(recipe.run_dir)
    assert plan["after_step"] == 0
    assert plan["fits"] is True
    assert plan["machine"]["threads"] == 1
    metrics = lines(Path(recipe.run_dir) / "metrics.jsonl")
    assert len(metrics) == 3
    for line in metrics:
        for name in PHASES[job]:
            assert line[f"estimated/{name}_seconds"] > 0
            assert line[f"{name}_seconds"] > 0
            assert line[f"estimated/{name}_memory_bytes"] > 0
            assert line.get(f"{name}_memory_bytes", 0) >= 0  # of a warm process nothing new
        top = [line[f"estimated/{name}_seconds"] for name in PHASES[job] if "/" not in name]
        assert line["estimated/step_seconds"] == pytest.approx(sum(top), abs=1e-5)
        total_bytes = line.get("estimated/peak_memory_bytes", line["peak_memory_bytes"])
        assert total_bytes > line["estimated/train_memory_bytes"]
    phases = plan["memory"]["phases"]
    roles = plan["memory"]["roles"]
    before = roles["run"]["framework"]["update"]
    beside = roles["verifiers"]["worker processes"]["update"]
    assert beside > 0  # processes of their own
    most = max(phases["score"], phases["update"])
    assert metrics[0]["estimated/train_memory_bytes"] == most - before - beside
    assert set(PHASES[job]) <= set(summary["phases"])
    for name in PHASES[job]:
        of = summary["phases"][name]
        estimated_seconds = metrics[0][f"estimated/{name}_seconds"]
        assert of["estimated_seconds"] == pytest.approx(estimated_seconds, abs=1e-6)
        times = sorted(line[f"{name}_seconds"] for line in metrics[1:])
        assert times[0] <= of["seconds"] <= times[-1]
    assert len(estimates.rows(summary["phases"])[0]) == len(estimates.COLUMNS)


@pytest.mark.slow
def test_a_resumed_run_keeps_its_plan_and_a_changed_one_has_a_second(
    make_recipe: MakeRecipe, console: Console
) -> None:
    recipe = make_recipe("sft", checkpoint={"save_steps": 1})
    train(recipe, console)
    before = plans(recipe.run_dir)
    run = Path(recipe.run_dir)
    resume(run, [], [], console)
    assert plans(recipe.run_dir) == before
    key = "batch.micro_train_tokens"
    resume(run, ["--steps", "4", f"--{key}", "256"], [key], console)
    after = plans(recipe.run_dir)
    assert [plan_line["after_step"] for plan_line in after] == [0, 3]
    assert after[0] == before[0]
    assert after[1]["sizes"]["micro_tokens"] == 256


def test_a_plan_that_cannot_be_made_stops_no_run_and_says_why(
    make_recipe: MakeRecipe, console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    def nobody_knows(model: object) -> Any:
        raise UsageError("the shape of it is not known")

    monkeypatch.setattr(estimates, "shape_of_model", nobody_knows)
    recipe = make_recipe("sft", steps=1)
    summary = train(recipe, console)
    (plan,) = plans(recipe.run_dir)
    assert "the shape of it is not known" in plan["problem"]
    events = lines(Path(recipe.run_dir) / "events.jsonl")
    assert [event["message"] for event in events if event["event"] == "no_plan"] == [
        plan["problem"]
    ]
    (line,) = lines(Path(recipe.run_dir) / "metrics.jsonl")
    assert not [key for key in line if key.startswith("estimated/")]
    assert "estimated_seconds" not in summary["phases"]["train"]


def test_what_is_measured_of_a_step_is_its_median_without_the_first(
    make_recipe: MakeRecipe,
) -> None:
    recipe = make_recipe("sft")
    metrics = [{"train_seconds": s, "train_memory_bytes": 7} for s in (9.0, 1.0, 2.0, 6.0)]
    of = estimates.Estimates({"train": 1.5}, {"train": 5, "load": 3})
    peaks = {"load_memory_bytes": 4, "train_memory_bytes": 8}
    assert of.beside(recipe, metrics, peaks) == {
        "load": {"estimated_memory_bytes": 3, "memory_bytes": 4},
        "train": {
            "estimated_seconds": 1.5,
            "seconds": 2.0,
            "estimated_memory_bytes": 5,
            "memory_bytes": 8,
        },
    }


def test_on_a_gpu_the_reserved_bytes_are_beside_the_plans(make_recipe: MakeRecipe) -> None:
    of = estimates.Estimates({}, {"train": 5}, "reserved")
    metrics = [{"train_seconds": 1.0, "train_memory_bytes": 7, "train_reserved_bytes": 9}]
    peaks = {"train_memory_bytes": 7, "train_reserved_bytes": 11}
    beside = of.beside(make_recipe("sft"), metrics, peaks)
    assert beside["train"]["memory_bytes"] == 11
    assert of.columns == {"estimated/train_reserved_bytes": 5}


@pytest.mark.parametrize(("torchs", "planned"), [(9_000_000_000, 9_000_000_000), (10**12, None)])
def test_a_run_plans_with_the_memory_that_torch_reports(
    torchs: int, planned: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a slice of a card, or of a virtual machine's part."""
    card = parse_hardware("A100-80G")
    monkeypatch.setattr(estimates, "require_device", lambda choices: None)
    monkeypatch.setattr(estimates, "this_machine", lambda: card)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (0, torchs))
    choices: Any = SimpleNamespace(device="cuda", threads=1)
    here = estimates.hardware_here(choices)
    assert here.device.memory_bytes == (planned or card.device.memory_bytes)
