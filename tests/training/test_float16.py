"""Runs in float16: what overflows is skipped and recorded, and a resume has the same bits."""

from pathlib import Path
from typing import Any

import pytest

from helpers.runs import assert_same_run, lines, tensors, train_until_killed
from postgrad.core.errors import RunError
from postgrad.learner import loss_scale
from postgrad.observe.console import Console
from postgrad.training.pairs import PreferenceJob
from postgrad.training.rl import RLJob
from postgrad.training.sft import SFTJob
from postgrad.training.start import resume, train


@pytest.mark.slow
@pytest.mark.parametrize(
    ("job", "kind", "changes"),
    [
        ("sft", SFTJob, {}),
        ("rl", RLJob, {"algorithm": {"type": "ppo", "kl_coef": 0.05}}),
        ("preference", PreferenceJob, {"algorithm": {"type": "dpo"}}),
    ],
    ids=["sft", "ppo", "dpo"],
)
def test_a_killed_run_ends_with_the_same_bits_and_says_what_it_skipped(
    job: str,
    kind: type,
    changes: dict[str, Any],
    make_recipe: Any,
    console: Console,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(loss_scale, "FIRST", 2.0**26)
    model, saves = {"dtype": "float16"}, {"save_steps": 1}
    uninterrupted = make_recipe(job, "whole", model=model, **changes, checkpoint=saves)
    killed = make_recipe(job, "killed", model=model, **changes, checkpoint=saves)
    train(uninterrupted, console)
    train_until_killed(monkeypatch, kind, 2, killed, console)
    resume(Path(killed.run_dir), [], [], console)
    assert_same_run(uninterrupted, killed, 3)
    metrics = lines(Path(uninterrupted.run_dir) / "metrics.jsonl")
    skipped = [line["policy/skipped_updates"] for line in metrics]
    assert skipped[0] > 0
    assert metrics[0]["policy/loss_scale"] <= 2.0**26
    assert metrics[-1]["update"] == sum(line.get("updates/made", 1) for line in metrics) - sum(
        skipped
    )
    events = lines(Path(uninterrupted.run_dir) / "events.jsonl")
    skip_events = [event for event in events if event["event"] == "update_skipped"]
    critic = sum(line.get("critic/skipped_updates", 0.0) for line in metrics)
    assert len(skip_events) == sum(skipped) + critic
    assert skip_events[0]["step"] == 1
    saved = tensors(uninterrupted.run_dir, 3)
    assert float(saved["policy.optimizer/loss_scale"]) < 2.0**26
    assert saved["policy.weights/model.norm.weight"].dtype.itemsize == 4


def test_a_run_whose_gradients_never_are_finite_ends_with_a_message(
    make_recipe: Any, console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loss_scale, "FIRST", 2.0**60)
    monkeypatch.setattr(loss_scale, "LEAST", 2.0**59)
    recipe = make_recipe("sft", model={"dtype": "float16"})
    with pytest.raises(RunError, match="whatever the scale of the loss"):
        train(recipe, console)
