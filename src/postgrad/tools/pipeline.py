"""`postgrad train DIR`: the recipes of DIR/pipeline.toml in order, each trained or sampled from,
then answers of the last model to a few questions, and one summary above all stages.
"""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from postgrad.core.errors import RunError
from postgrad.core.files import finite, remove, write_json
from postgrad.core.text import fixed
from postgrad.observe.console import Console
from postgrad.observe.follow import read_object
from postgrad.observe.run_dir import SUMMARY
from postgrad.recipe.pipeline import Pipeline, Stage, with_models, with_rows
from postgrad.recipe.recipe import Answering, Recipe
from postgrad.tools.asking import Answer, ask
from postgrad.tools.generate import SHARDS, Extent, generate, is_generated
from postgrad.tools.selection import select, selection_for
from postgrad.training.run import resident_bytes
from postgrad.training.start import train
from postgrad.training.summary import PHASES, change, whole_seconds


def train_pipeline(
    pipeline: Pipeline,
    console: Console,
    *,
    overwrite: bool = False,
    allow_change: Sequence[str] = (),
) -> dict[str, Any]:
    """Runs every stage in run_dir/NAME and returns the summary, written to run_dir/summary.json.

    accuracy_before and accuracy_after are of the last stage that was evaluated; seconds and
    peak_memory_bytes are of all stages together. A stage that has ended is not run again; where all
    have, the summary of then is returned.
    """
    began = time.perf_counter()
    models: dict[str, str] = {}
    rows: dict[str, str] = {}
    summaries: dict[str, dict[str, Any]] = {}
    for stage in pipeline.stages:
        recipe = with_rows(with_models(stage.recipe, models), rows)
        console.heading(f"{stage.name}: {stage.path}")
        if stage.generate is not None:
            summaries[stage.name] = _generate(stage, recipe, console, overwrite=overwrite)
            rows[stage.name] = str(stage.rows)
            continue
        recipe = _saving(recipe)
        summaries[stage.name] = train(
            recipe, console, overwrite=overwrite, allow_change=allow_change
        )
        models[stage.name] = summaries[stage.name]["model"]
    earlier = read_object(pipeline.run_dir / SUMMARY)
    if earlier is not None and earlier.get("stages") == finite(summaries):
        _show(pipeline, earlier, (), console)
        return earlier
    last = pipeline.stages[-1]
    answers = _answers(last, models[last.name], pipeline.ask)
    summary = _summary(summaries, answers, time.perf_counter() - began)
    write_json(pipeline.run_dir / SUMMARY, finite(summary))
    _show(pipeline, summary, answers, console)
    return summary


def _generate(stage: Stage, recipe: Recipe, console: Console, *, overwrite: bool) -> dict[str, Any]:
    """Samples a stage's answers and selects its rows; what is there already is not sampled again.
    The summary, written beside the rows. seconds: of the process that ended it.
    """
    began = time.perf_counter()
    assert stage.generate is not None
    to, settings = Path(recipe.run_dir), stage.generate
    if overwrite and is_generated(to):
        remove(to)
    extent = Extent(settings.samples, settings.rows, settings.shard)
    chosen = settings.model_dump(exclude={"samples", "rows", "shard", "select", "format"})
    selection = selection_for(recipe, kind=settings.select, **chosen)
    generated = generate(recipe, to, console, extent)
    source = {"generated": generated.name, "selection": settings.model_dump(mode="json")}
    earlier = read_object(to / SUMMARY) or {}
    if stage.rows.is_file() and source.items() <= earlier.items():
        console.note(f"{stage.rows} is complete: nothing to do")
        return earlier
    selected = select(generated.groups(stage.rows), selection, stage.rows, generated.name)
    console.table(f"rows selected: {stage.rows}", ("", ""), selected.table())
    if not selected.counts["rows"]:
        raise RunError(
            f"{stage.name} selected no row of {selected.counts['samples']} samples, so that the "
            f"next recipe has nothing to train on: see the table above, or read {to / SHARDS}"
        )
    seconds = round(time.perf_counter() - began, 3)
    summary: dict[str, Any] = {
        "job": "generate",
        "run_dir": str(to),
        **source,
        "rows": str(stage.rows),
        "counts": dict(selected.counts),
        "loss": None,
        "evaluations": {},
        "seconds": seconds,
        "phase_seconds": {"sample": seconds},
        "peak_memory_bytes": resident_bytes(),
    }
    write_json(to / SUMMARY, summary)
    return finite(summary)


def _saving(recipe: Recipe) -> Recipe:
    """The recipe with checkpoint.save_hf on: later stages start from exported models."""
    saved = recipe.checkpoint.save_hf or True
    checkpoint = recipe.checkpoint.model_copy(update={"save_hf": saved})
    return recipe.model_copy(update={"checkpoint": checkpoint})


def _answers(stage: Stage, model: str, count: int) -> list[Answer]:
    recipe = stage.recipe
    if not count or not recipe.eval.sets or not recipe.evaluates_answers:
        return []
    assert isinstance(recipe, Answering)  # only those sample
    return ask(model, recipe, count)


def _summary(
    stages: dict[str, dict[str, Any]], answers: Sequence[Answer], seconds: float
) -> dict[str, Any]:
    evaluated = [summary for summary in stages.values() if "accuracy_after" in summary]
    accuracies = {k: v for k, v in (evaluated or [{}])[-1].items() if "accuracy_" in k}
    return {
        **accuracies,
        "seconds": round(seconds, 3),
        "peak_memory_bytes": max(summary["peak_memory_bytes"] for summary in stages.values()),
        "answers": [answer.to_json() for answer in answers],
        "stages": stages,
    }


def _show(
    pipeline: Pipeline, summary: dict[str, Any], answers: Sequence[Answer], console: Console
) -> None:
    if answers:
        rows = [
            (answer.question, " → ".join(answer.written), answer.reference or "")
            for answer in answers
        ]
        title = f"plain transformers with {summary['stages'][pipeline.stages[-1].name]['model']}"
        several = any(len(answer.written) > 1 for answer in answers)
        written_column = (
            "its turns, an answer of the environment after each" if several else "answer"
        )
        console.table(title, ("question", written_column, "reference"), rows)
    stages = summary["stages"]
    seconds = max(summary["seconds"], sum(whole_seconds(stage) for stage in stages.values()))
    console.table(
        f"{pipeline.name}: {seconds:.0f} s, {_gib(summary)} at its peak",
        ("", *stages),
        _rows(list(stages.values())),
    )
    console.note(f"summary: {pipeline.run_dir / SUMMARY}")


def _rows(stages: Sequence[dict[str, Any]]) -> list[tuple[str, ...]]:
    """The rows of the summary table: a row for each figure, a column for each stage."""
    phases = [phase for phase in PHASES if any(phase in stage["phase_seconds"] for stage in stages)]
    rows = [*_reached(stages), ("time", *(f"{whole_seconds(stage):.1f} s" for stage in stages))]
    for phase in phases:
        seconds = (stage["phase_seconds"].get(phase) for stage in stages)
        rows.append((f"  {phase}", *("" if t is None else f"{t:.1f} s" for t in seconds)))
    for speed, verb in (("response", "sampled"), ("train", "trained")):
        speeds = (stage.get(f"{speed}_tokens_per_second") for stage in stages)
        rows.append((f"tokens {verb}", *(f"{n:,.0f} /s" if n else "" for n in speeds)))
    return [*rows, ("peak memory", *map(_gib, stages))]


def _reached(stages: Sequence[dict[str, Any]]) -> list[tuple[str, ...]]:
    """Rows with evaluation results, the loss, and the policy's KL from its reference. The loss of
    RL is left out: it is near 0 whatever happens.
    """
    rows = [("accuracy", *(change(stage, "accuracy") for stage in stages))]
    for name in _sets(stages):
        accuracies = (stage["evaluations"].get(f"eval/{name}/accuracy") for stage in stages)
        rows.append((f"  {name}", *("" if x is None else f"{x:.3f}" for x in accuracies)))
    selected = (f"{s['counts']['rows']:,}" if s["job"] == "generate" else "" for s in stages)
    rows.append(("rows selected", *selected))
    rows.append(("held-out loss", *(change(stage, "loss") for stage in stages)))
    rows.append(("greedy accuracy", *(change(stage, "greedy_accuracy") for stage in stages)))
    rows.append(("reward", *(change(stage, "reward") for stage in stages)))
    parts = [_components(stage) for stage in stages]
    names = list(dict.fromkeys(name for components in parts for name in components))
    if any(len(components) > 1 for components in parts):
        rows += [
            (f"  {name}", *(components.get(name, "") for components in parts)) for name in names
        ]
    losses = (None if stage["job"] == "rl" else stage["loss"] for stage in stages)
    rows.append(("loss", *("" if loss is None else fixed(loss, "{:.4f}") for loss in losses)))
    rows.append(("KL per token", *map(_kl, stages)))
    rows.append(
        ("KL per response", *(f"{x['kl']['sequence']:.2f}" if "kl" in x else "" for x in stages))
    )
    return [row for row in rows if any(row[1:])]


def _sets(stages: Sequence[dict[str, Any]]) -> list[str]:
    """The names of all evaluation sets that have a name."""
    keys = [key for stage in stages for key in stage["evaluations"]]
    named = [key.split("/")[1] for key in keys if key.count("/") == 2 and key.endswith("/accuracy")]
    return list(dict.fromkeys(named))


def _components(stage: dict[str, Any]) -> dict[str, str]:
    """The reward's components by name, each as "before → after"."""
    flat = {
        name: {"_before": reward["before"], "_after": reward["after"]}
        for name, reward in stage.get("rewards", {}).items()
    }
    return {name: change(values, "") for name, values in flat.items()}


def _kl(stage: dict[str, Any]) -> str:
    """KL per token in nats: the mean at the end, the target, and the most of any step."""
    if "kl" not in stage:
        return ""
    kl = stage["kl"]
    bounds = [f"most {kl['token_most']:.3f}"]
    if kl["target"] is not None:
        bounds.insert(0, f"target {kl['target']:g}")
    return f"{kl['token']:.3f} ({', '.join(bounds)})"


def _gib(summary: dict[str, Any]) -> str:
    return f"{summary['peak_memory_bytes'] / 2**30:.2f} GiB"
