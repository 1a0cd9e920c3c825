"""`postgrad train DIR`: the recipes of DIR/pipeline.toml in order, one summary above them."""

import time
from collections.abc import Sequence
from typing import Any

from postgrad.core.files import finite, write_json
from postgrad.jobs.answers import Answer, ask
from postgrad.jobs.summary import PHASES
from postgrad.jobs.train import train
from postgrad.observe.console import Console
from postgrad.recipe.pipeline import Pipeline, Stage, with_models
from postgrad.recipe.recipe import Answering, Recipe


def train_pipeline(
    pipeline: Pipeline,
    console: Console,
    *,
    overwrite: bool = False,
    allow_change: Sequence[str] = (),
) -> dict[str, Any]:
    """Runs every stage in run_dir/NAME and returns the summary, written to run_dir/summary.json.

    accuracy_before and accuracy_after are those of the last stage that was evaluated; seconds and
    peak_memory_bytes are of the whole. A stage that has ended is not run again.
    """
    began = time.perf_counter()
    models: dict[str, str] = {}
    summaries: dict[str, dict[str, Any]] = {}
    for stage in pipeline.stages:
        recipe = _saving(with_models(stage.recipe, models))
        console.heading(f"{stage.name}: {stage.path}")
        summaries[stage.name] = train(
            recipe, console, overwrite=overwrite, allow_change=allow_change
        )
        models[stage.name] = summaries[stage.name]["model"]
    last = pipeline.stages[-1]
    answers = _answers(last, models[last.name], pipeline.ask)
    summary = _summary(summaries, answers, time.perf_counter() - began)
    write_json(pipeline.run_dir / "summary.json", finite(summary))
    _show(pipeline, summary, answers, console)
    return summary


def _saving(recipe: Recipe) -> Recipe:
    """Later stages start from exported models."""
    checkpoint = recipe.checkpoint.model_copy(update={"save_hf": True})
    return recipe.model_copy(update={"checkpoint": checkpoint})


def _answers(stage: Stage, model: str, count: int) -> list[Answer]:
    recipe = stage.recipe
    if not count or not isinstance(recipe, Answering) or not recipe.eval.sets:
        return []
    return ask(model, recipe, count)


def _summary(
    stages: dict[str, dict[str, Any]], answers: Sequence[Answer], seconds: float
) -> dict[str, Any]:
    evaluated = [one for one in stages.values() if "accuracy_after" in one]
    accuracies = {k: v for k, v in (evaluated or [{}])[-1].items() if "accuracy_" in k}
    return {
        **accuracies,
        "seconds": round(seconds, 3),
        "peak_memory_bytes": max(one["peak_memory_bytes"] for one in stages.values()),
        "answers": [answer.to_json() for answer in answers],
        "stages": stages,
    }


def _show(
    pipeline: Pipeline, summary: dict[str, Any], answers: Sequence[Answer], console: Console
) -> None:
    if answers:
        rows = [(one.question, " → ".join(one.written), one.reference or "") for one in answers]
        title = f"plain transformers with {summary['stages'][pipeline.stages[-1].name]['model']}"
        several = any(len(one.written) > 1 for one in answers)
        said = "its turns, an answer of the environment after each" if several else "answer"
        console.table(title, ("question", said, "reference"), rows)
    stages = summary["stages"]
    console.table(
        f"{pipeline.name}: {summary['seconds']:.0f} s, {_gib(summary)} at its peak",
        ("", *stages),
        _rows(list(stages.values())),
    )
    console.note(f"summary: {pipeline.run_dir / 'summary.json'}")


def _rows(stages: Sequence[dict[str, Any]]) -> list[tuple[str, ...]]:
    """A line for each figure, a column for each stage."""
    phases = [phase for phase in PHASES if any(phase in one["phase_seconds"] for one in stages)]
    rows = [
        ("accuracy", *(_change(one, "accuracy") for one in stages)),
        ("greedy accuracy", *(_change(one, "greedy_accuracy") for one in stages)),
        ("time", *(f"{one['seconds']:.1f} s" for one in stages)),
    ]
    for phase in phases:
        known = (one["phase_seconds"].get(phase) for one in stages)
        rows.append((f"  {phase}", *("" if t is None else f"{t:.1f} s" for t in known)))
    for speed, what in (("response", "sampled"), ("train", "trained")):
        known = (one.get(f"{speed}_tokens_per_second") for one in stages)
        rows.append((f"tokens {what}", *(f"{n:,.0f} /s" if n else "" for n in known)))
    return [*rows, ("peak memory", *map(_gib, stages))]


def _gib(one: dict[str, Any]) -> str:
    return f"{one['peak_memory_bytes'] / 2**30:.2f} GiB"


def _change(one: dict[str, Any], what: str) -> str:
    after = one.get(f"{what}_after")
    if after is None:
        return ""
    before = one.get(f"{what}_before")
    return f"{after:.3f}" if before is None else f"{before:.3f} → {after:.3f}"
