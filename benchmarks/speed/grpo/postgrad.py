"""GRPO by postgrad: the job of `job = "rl"`."""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.speed import postgrad_rounds
from benchmarks.speed.grpo.task import endless, prompts, questions, sizes
from benchmarks.speed.side import Options, Round
from benchmarks.speed.workload import write_rows


def prepare(folder: Path, options: Options) -> Round:
    """See Side."""
    samples, new_tokens = sizes(folder)
    rows = folder / f"grpo-{options.precision}.jsonl"
    write_rows(rows, questions(folder, options))
    recipe: dict[str, Any] = {
        "job": "rl",
        "model": {"path": str(endless(folder))},
        "data": {"path": str(rows), "shuffle": False, "cache": False},
        "rewards": [{"type": "benchmarks.speed.grpo.verifier:score"}],
        "algorithm": {"type": "grpo", "clip_low": 0.2, "clip_high": 0.2, "kl_coef": 0.0},
        "batch": {"rollout_batch_size": prompts(options), "n_samples_per_prompt": samples},
        "rollout": {"max_new_tokens": new_tokens, "dtype": options.precision},
    }
    if "micro_batch" in options.extra:
        recipe["batch"]["micro_train_batch_size"] = options.extra["micro_batch"]
    return postgrad_rounds.rounds(folder, options, recipe, partial(count, prompts(options)))


def count(asked: int, number: int, metrics: Mapping[str, float]) -> dict[str, int]:
    """All samples are in the update, also those without gradient, and none is dropped. asked:
    questions of a step.
    """
    assert not metrics["dropped_samples"]
    tokens = int(metrics["response_tokens"])
    equal = metrics["groups/equal_fraction"] * asked
    return {
        "samples": int(metrics["samples"]),
        "sampled_tokens": tokens,
        "trained_tokens": tokens,
        "groups_without_gradient": round(equal),
    }
