"""A reward model by postgrad: the job of `job = "reward"`."""

from collections.abc import Mapping
from pathlib import Path

from benchmarks.speed import postgrad_rounds
from benchmarks.speed.reward.task import UPDATE, start
from benchmarks.speed.side import Options, Round
from benchmarks.speed.tokens import PAIRS, read_tokens


def prepare(folder: Path, options: Options) -> Round:
    """See Side."""
    recipe = {
        "job": "reward",
        "model": {"path": str(start(folder))},
        "data": {"path": str(folder / "pairs.jsonl"), "cache": False, **PAIRS},
        "batch": {"train_batch_size": UPDATE},
    }
    lengths = [sum(map(len, pair)) for pair in read_tokens(folder, "pairs")]

    def count(number: int, metrics: Mapping[str, float]) -> dict[str, int]:
        """Rows are drawn in their order, epoch after epoch."""
        first = (number - 1) * UPDATE
        read = (lengths[place % len(lengths)] for place in range(first, first + UPDATE))
        return {"pairs": int(metrics["samples"]), "trained_tokens": sum(read)}

    return postgrad_rounds.rounds(folder, options, recipe, count)
