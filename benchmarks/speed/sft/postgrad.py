"""SFT by postgrad: the job of `job = "sft"`."""

from collections.abc import Mapping
from pathlib import Path

from benchmarks.speed import postgrad_rounds
from benchmarks.speed.sft.task import UPDATE
from benchmarks.speed.side import Options, Round
from benchmarks.speed.tokens import CONVERSATIONS


def prepare(folder: Path, options: Options) -> Round:
    """See Side."""
    recipe = {
        "job": "sft",
        "model": {"path": str(folder / "model")},
        "data": {"path": str(folder / "questions.jsonl"), "cache": False, **CONVERSATIONS},
        "batch": {"train_batch_size": UPDATE},
    }
    return postgrad_rounds.rounds(folder, options, recipe, count)


def count(number: int, metrics: Mapping[str, float]) -> dict[str, int]:
    """What the step says."""
    return {"rows": int(metrics["samples"]), "trained_tokens": int(metrics["loss_tokens"])}
