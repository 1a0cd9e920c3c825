"""The quickstart in small: SFT, RL from its model, export, answers by plain transformers."""

import json
from pathlib import Path
from typing import Any

import pytest

from postgrad.jobs.export import export
from postgrad.jobs.pipeline import train_pipeline
from postgrad.models.hashes import directory_hash
from postgrad.observe.console import Console
from postgrad.recipe.pipeline import load_pipeline

ROOT = Path(__file__).parent.parent.parent
SMALL = [
    "--sft.steps", "2", "--rl.steps", "2", "--data.size", "64", "--eval.size", "8",
    "--sft.model.init.hidden_size", "24", "--sft.model.init.num_hidden_layers", "1",
    "--sft.learner.warmup_updates", "0", "--rl.learner.warmup_updates", "0",
    "--rl.batch.rollout_batch_size", "4", "--rl.batch.n_samples_per_prompt", "2",
    "--learner.threads", "1", "--scoring.workers", "1",
]  # fmt: skip


@pytest.fixture
def summary(tmp_path: Path, console: Console) -> dict[str, Any]:
    pipeline = load_pipeline(
        ROOT / "recipes" / "quickstart", [*SMALL, "--run_dir", str(tmp_path / "run")]
    )
    return train_pipeline(pipeline, console)


def test_the_summary_has_what_people_look_for(summary: dict[str, Any], tmp_path: Path) -> None:
    written = json.loads((tmp_path / "run" / "summary.json").read_text("utf-8"))
    assert written == summary
    assert 0.0 <= summary["accuracy_before"] <= 1.0
    assert 0.0 <= summary["accuracy_after"] <= 1.0
    assert summary["peak_memory_bytes"] > 10**8
    assert summary["seconds"] > 0
    assert list(summary["stages"]) == ["sft", "rl"]
    assert summary["stages"]["sft"]["accuracy_after"] == summary["accuracy_before"]
    answers = summary["answers"]
    assert len(answers) == 3
    for one in answers:
        word = one["question"].rpartition(": ")[2]
        assert one["reference"] == word[::-1]


def test_what_is_held_out_is_never_trained_on(summary: dict[str, Any], tmp_path: Path) -> None:
    held_out = {one["question"].casefold() for one in summary["answers"]}
    seen = [
        json.loads(line)["question"].casefold()
        for line in (tmp_path / "run" / "rl" / "samples.jsonl").open(encoding="utf-8")
    ]
    assert len(seen) == 2 * 4 * 2
    assert not held_out & set(seen)


def test_a_checkpoint_is_exported_without_the_run(summary: dict[str, Any], tmp_path: Path) -> None:
    to = export(tmp_path / "run" / "rl", "latest", tmp_path / "model")
    assert directory_hash(to) == directory_hash(tmp_path / "run" / "rl" / "model")


def test_the_same_command_goes_on_after_a_kill(
    summary: dict[str, Any], tmp_path: Path, console: Console
) -> None:
    metrics = (tmp_path / "run" / "rl" / "metrics.jsonl").read_bytes()
    pipeline = load_pipeline(
        ROOT / "recipes" / "quickstart", [*SMALL, "--run_dir", str(tmp_path / "run")]
    )
    again = train_pipeline(pipeline, console)
    assert again["accuracy_after"] == summary["accuracy_after"]
    assert (tmp_path / "run" / "rl" / "metrics.jsonl").read_bytes() == metrics
