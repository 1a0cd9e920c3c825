"""The quickstart in small: SFT, RL from its model, export, answers by plain transformers."""

import json
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from postgrad.models.save import directory_hash
from postgrad.observe.console import Console
from postgrad.recipe.pipeline import load_pipeline
from postgrad.tools.export import export
from postgrad.tools.pipeline import train_pipeline

ROOT = Path(__file__).parent.parent.parent
SMALL = [
    "--sft.steps", "2", "--rl.steps", "2", "--data.size", "64", "--eval.size", "8",
    "--sft.model.init.hidden_size", "24", "--sft.model.init.num_hidden_layers", "1",
    "--sft.learner.warmup_updates", "0", "--rl.learner.warmup_updates", "0",
    "--rl.batch.rollout_batch_size", "4", "--rl.batch.n_samples_per_prompt", "2",
    "--learner.threads", "1", "--scoring.workers", "1",
]  # fmt: skip


def quickstart(run: Path) -> dict[str, Any]:
    flags = [*SMALL, "--run_dir", str(run)]
    return train_pipeline(load_pipeline(ROOT / "recipes" / "quickstart", flags), Console("quiet"))


class Ended(NamedTuple):
    """A whole pipeline: what it returned, its folder, and a copy of that which nothing goes on."""

    summary: dict[str, Any]
    run: Path
    left: Path


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Ended:
    run = tmp_path_factory.mktemp("quickstart") / "run"
    summary = quickstart(run)
    return Ended(summary, run, Path(shutil.copytree(run, run.with_name("left"))))


def test_the_summary_has_what_people_look_for(ended: Ended) -> None:
    summary = ended.summary
    written = json.loads((ended.left / "summary.json").read_text("utf-8"))
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


def test_what_is_held_out_is_never_trained_on(ended: Ended) -> None:
    held_out = {one["question"].casefold() for one in ended.summary["answers"]}
    seen = [
        json.loads(line)["question"].casefold()
        for line in (ended.left / "rl" / "samples.jsonl").open(encoding="utf-8")
    ]
    assert len(seen) == 2 * 4 * 2
    assert not held_out & set(seen)


def test_a_checkpoint_is_exported_without_the_run(ended: Ended, tmp_path: Path) -> None:
    to = export(ended.left / "rl", "latest", tmp_path / "model")
    assert directory_hash(to) == directory_hash(ended.left / "rl" / "model")


def test_the_same_command_goes_on_after_a_kill(ended: Ended) -> None:
    metrics = (ended.left / "rl" / "metrics.jsonl").read_bytes()
    again = quickstart(ended.run)
    assert again["accuracy_after"] == ended.summary["accuracy_after"]
    assert (ended.run / "rl" / "metrics.jsonl").read_bytes() == metrics


def test_a_pipeline_that_has_ended_does_nothing(ended: Ended) -> None:
    quickstart(ended.run)
    files = [path for path in ended.run.rglob("*") if path.is_file()]
    before = {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in files}
    again = quickstart(ended.run)
    assert again == json.loads((ended.run / "summary.json").read_text("utf-8"))
    assert {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in files} == before
