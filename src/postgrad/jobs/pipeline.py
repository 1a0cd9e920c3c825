"""`postgrad train DIR`: the recipes of DIR/pipeline.toml in order, one summary above them."""

import time
from collections.abc import Sequence
from typing import Any

from postgrad.core.files import finite, write_json
from postgrad.jobs.answers import Answer, ask
from postgrad.jobs.summary import PHASES, change, whole_seconds
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
    saved = recipe.checkpoint.save_hf or True
    checkpoint = recipe.checkpoint.model_copy(update={"save_hf": saved})
    return recipe.model_copy(update={"checkpoint": checkpoint})


def _answers(stage: Stage, model: str, count: int) -> list[Answer]:
    recipe = stage.recipe
    if not count or not isinstance(recipe, Answering) or not recipe.eval.sets:
        return []
    if not recipe.samples_answers:  # held-out conversations, of which only the loss is asked
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
    seconds = max(summary["seconds"], sum(whole_seconds(one) for one in stages.values()))
    console.table(
        f"{pipeline.name}: {seconds:.0f} s, {_gib(summary)} at its peak",
        ("", *stages),
        _rows(list(stages.values())),
    )
    console.note(f"summary: {pipeline.run_dir / 'summary.json'}")


def _rows(stages: Sequence[dict[str, Any]]) -> list[tuple[str, ...]]:
    """A line for each figure, a column for each stage."""
    phases = [phase for phase in PHASES if any(phase in one["phase_seconds"] for one in stages)]
    rows = [*_reached(stages), ("time", *(f"{whole_seconds(one):.1f} s" for one in stages))]
    for phase in phases:
        known = (one["phase_seconds"].get(phase) for one in stages)
        rows.append((f"  {phase}", *("" if t is None else f"{t:.1f} s" for t in known)))
    for speed, what in (("response", "sampled"), ("train", "trained")):
        known = (one.get(f"{speed}_tokens_per_second") for one in stages)
        rows.append((f"tokens {what}", *(f"{n:,.0f} /s" if n else "" for n in known)))
    return [*rows, ("peak memory", *map(_gib, stages))]


def _reached(stages: Sequence[dict[str, Any]]) -> list[tuple[str, ...]]:
    """What the evaluations say, the loss, and how far a policy went from its reference."""
    rows = [("accuracy", *(change(one, "accuracy") for one in stages))]
    for name in _sets(stages):
        known = (one["evaluations"].get(f"eval/{name}/accuracy") for one in stages)
        rows.append((f"  {name}", *("" if x is None else f"{x:.3f}" for x in known)))
    rows.append(("held-out loss", *(change(one, "loss") for one in stages)))
    rows.append(("greedy accuracy", *(change(one, "greedy_accuracy") for one in stages)))
    rows.append(("reward", *(change(one, "reward") for one in stages)))
    parts = [_components(one) for one in stages]
    names = list(dict.fromkeys(name for one in parts for name in one))
    if any(len(one) > 1 for one in parts):
        rows += [(f"  {name}", *(one.get(name, "") for one in parts)) for name in names]
    rows.append(("loss", *("" if (x := one["loss"]) is None else _four(x) for one in stages)))
    rows.append(("KL per token", *map(_kl, stages)))
    rows.append(
        ("KL per response", *(f"{x['kl']['sequence']:.2f}" if "kl" in x else "" for x in stages))
    )
    return [row for row in rows if any(row[1:])]


def _four(value: float) -> str:
    return f"{round(value, 4) + 0.0:.4f}"  # never -0.0000


def _sets(stages: Sequence[dict[str, Any]]) -> list[str]:
    """The names of evaluation sets that have one."""
    keys = [key for one in stages for key in one["evaluations"]]
    named = [key.split("/")[1] for key in keys if key.count("/") == 2 and key.endswith("/accuracy")]
    return list(dict.fromkeys(named))


def _components(one: dict[str, Any]) -> dict[str, str]:
    """Of the reward, each with how it changed."""
    flat = {
        name: {"_before": found["before"], "_after": found["after"]}
        for name, found in one.get("rewards", {}).items()
    }
    return {name: change(found, "") for name, found in flat.items()}


def _kl(one: dict[str, Any]) -> str:
    """Nats at the end, what they were held to, and the most of any step."""
    if "kl" not in one:
        return ""
    found = one["kl"]
    told = [f"most {found['token_most']:.3f}"]
    if found["target"] is not None:
        told.insert(0, f"target {found['target']:g}")
    return f"{found['token']:.3f} ({', '.join(told)})"


def _gib(one: dict[str, Any]) -> str:
    return f"{one['peak_memory_bytes'] / 2**30:.2f} GiB"
