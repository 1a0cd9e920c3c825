"""What a plan says of a drawn recipe and what its run made, for benchmarks/random_recipes.py.

Counts are equal, or a number is wrong. Tokens and memory are estimates, and are collected as ratios
of the plan's to the run's.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from benchmarks.drawn_values import Table
from helpers.runs import lines, tensors
from postgrad.fleet.exported import own_role
from postgrad.plan.lengths import row_lengths
from postgrad.recipe.recipe import Recipe
from postgrad.training.run import Run

# Bytes of each of an optimizer's numbers in a checkpoint, beside what is planned: of updates, and
# in float16 two of the scale of the loss.
NUMBER = 8
# Of the tokens of episodes those that a plan has to foresee. How long replies are is assumed there,
# and an episode may begin anew behind each of them.
LEAST_OF_EPISODES = 0.5
Counts = dict[str, tuple[Any, Any]]  # by name: planned, made


@contextmanager
def rows_of_runs(rows: list[int]) -> Iterator[None]:
    """Inside, each run that reads its data appends the number of its rows."""
    original = Run.count_rows

    def count(self: Run, number: int) -> None:
        rows.append(number)
        original(self, number)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Run, "count_rows", count)
        yield


def counts(report: Table, recipe: Recipe, summary: Table, rows: int) -> Counts:
    """What the plan counted and what the run made, without what depends on the rows' texts or on
    the samples. report: of `plan`. rows: that the run found.
    """
    batch, logged = report["batch"], logged_by(recipe)
    compared: Counts = {}
    lengths = row_lengths(recipe)
    left_out = lengths is None or "will leave out" in lengths.source
    if lengths is not None and not left_out:
        compared["rows"] = (lengths.rows, rows)
    foreseen = recipe.steps is not None or not left_out
    if not recipe.checkpoint.early_stop and batch["steps"] is not None and foreseen:
        compared["steps"] = (batch["steps"], summary["steps"])
    rollout = recipe.rollout_settings
    if recipe.trains_on_rollouts and rollout is not None and not rollout.dynamic_sampling:
        for number, line in enumerate(logged, 1):
            compared[f"samples of step {number}"] = (batch["samples_per_step"], line["samples"])
    if summary["steps"] == batch["steps"] and not any(map(_lacks_samples, logged)):
        compared["updates"] = (batch["total_updates"], summary["updates"])
        compared["episodes"] = (batch["total_episodes"], summary["episodes"])
        if recipe.learner.ranks == 1 and not _guesses_vocabulary(recipe):
            compared |= _saved(report, recipe, summary["steps"])
    return compared


def _lacks_samples(line: Table) -> bool:
    """Whether a step learned from fewer samples than it has room for, drew more than that, or
    skipped an update in float16.
    """
    names = ("dropped_samples", "groups/dropped", "sampling/filtered_groups")
    skipped = any(value for name, value in line.items() if name.endswith("/skipped_updates"))
    return skipped or any(line.get(name, 0) for name in names)


def _guesses_vocabulary(recipe: Recipe) -> bool:
    """Whether a tokenizer is trained, which may find fewer tokens than its `vocab_size`."""
    init = recipe.model.init
    return recipe.model.path is None and init is not None and init.tokenizer.kind == "bpe"


def _saved(report: Table, recipe: Recipe, steps: int) -> Counts:
    """Of the newest checkpoint: the trained weights, and the bytes of all its tensors."""
    kept, role = tensors(recipe.run_dir, steps), own_role(recipe)
    stem = "reward_model" if role == "reward" else role
    trained = sum(w.numel() for name, w in kept.items() if name.startswith(f"{stem}.weights/"))
    optimizers = len({name.partition("/")[0] for name in kept if ".optim" in name})
    counters = (3 if recipe.model.dtype == "float16" else 1) * NUMBER * optimizers
    stored = sum(w.nbytes for name, w in kept.items() if not name.startswith("pending/"))
    return {
        "trained weights": (report["parameters"][stem]["trained"], trained),
        "checkpoint bytes": (report["batch"]["checkpoint_bytes"], stored - counters),
    }


def logged_by(recipe: Recipe) -> list[Table]:
    """The lines of a run's metrics."""
    return lines(Path(recipe.run_dir) / "metrics.jsonl")


def computed_tokens(report: Table, logged: list[Table]) -> float:
    """Tokens of a mean pass over the samples of a step."""
    stem = "policy" if "policy" in report["parameters"] else "reward_model"
    passes = len(logged) * report["batch"]["epochs_per_rollout"]
    return sum(line.get(f"{stem}/computed_tokens", 0) for line in logged) / passes


def too_few_tokens(report: Table, recipe: Recipe) -> str | None:
    """What is wrong with the tokens that a plan foresees of episodes; None: nothing. Episodes that
    end early, and groups that are not computed, have fewer.
    """
    planned, run = report["batch"]["tokens_per_step"], computed_tokens(report, logged_by(recipe))
    if getattr(recipe, "environment", None) is None or planned >= LEAST_OF_EPISODES * run:
        return None
    return f"tokens of a step with an environment: {planned} planned, {run:.0f} computed"


@dataclass
class Ratios:
    """Estimates over measurements, of all runs, by name."""

    of: dict[str, list[float]] = field(default_factory=dict[str, list[float]])

    def add(self, report: Table, recipe: Recipe) -> None:
        """Tokens of an update's pass by kind of job; memory of each phase and of the process."""
        logged = logged_by(recipe)
        tokens = computed_tokens(report, logged)
        kind = "with an environment" if getattr(recipe, "environment", None) else ""
        self._put(
            f"tokens, {recipe.job} {kind}".strip(), report["batch"]["tokens_per_step"], tokens
        )
        for name, value in logged[-1].items():
            if name.startswith("estimated/") and name.endswith("_bytes"):
                self._put(name, value, logged[-1].get(name.partition("/")[2], 0))

    def _put(self, name: str, planned: float, measured: float) -> None:
        if measured > 0:
            self.of.setdefault(name, []).append(planned / measured)

    def rows(self) -> Iterator[str]:
        """Least, median and greatest ratio of each name, and of how many runs."""
        for name, ratios in sorted(self.of.items()):
            figures = (min(ratios), median(ratios), max(ratios))
            shown = " ".join(f"{f:8.2f}" if math.isfinite(f) else "       -" for f in figures)
            yield f"{name:<42}{shown}  {len(ratios)}"
