"""What a run writes behind its last save: the exported model, its copy on the hub, and the end of
the run in numbers: summary.json, and the table a person sees.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from postgrad.checkpoint.state import RunState
from postgrad.core.errors import RunError
from postgrad.core.text import how_many
from postgrad.fleet.exported import own_role, role_of
from postgrad.observe.follow import read_steps, set_of
from postgrad.recipe.compare import recipe_hash
from postgrad.recipe.recipe import Answering, Recipe
from postgrad.recipe.scored import rates_mean_nothing
from postgrad.training.card import card_of, push
from postgrad.training.loop import Job
from postgrad.training.restoring import record_of
from postgrad.training.run import Run

PHASES = ("load", "sample", "train", "publish", "log", "other", "save", "evaluate", "export")
CHANGING = {  # what evaluations say, before and after, and what a person calls it
    "accuracy": "accuracy",
    "greedy_accuracy": "greedy accuracy",
    "loss": "held-out loss",
    "reward": "reward",
}
RATES = ("accuracy", "greedy_accuracy")
LAST = 10  # steps at the end of a run over which a noisy number is averaged
SAMPLED = ("sample_seconds", "overlap/sample_seconds")  # alone, and while the policy learned
TOKENS = {  # tokens of a step, of all engines or of each role, and the times of making them
    "response_tokens_per_second": (re.compile("response_tokens"), SAMPLED),
    "train_tokens_per_second": (re.compile("[^/]+/computed_tokens"), ("train_seconds",)),
}


def finish(run: Run, job: Job, base: str, state: RunState) -> dict[str, Any]:
    """Exports the trained model where the recipe asks for it, and writes the summary; returns the
    summary. base: of the policy. Raises RunError where one of them cannot be written: a resume
    writes it.
    """
    try:
        model = _export(run, job, base, state)
        summary = {**summarise(run, state, model), "recipe_sha256": recipe_hash(run.recipe)}
        run.directory.write_summary(summary)
    except RunError as error:
        if type(error) is not RunError:  # a lost process: the run is restarted
            raise
        resume = run.directory.resume_command
        raise RunError(f"{error}; every step is saved; {resume} writes what is missing") from error
    return summary


def _export(run: Run, job: Job, base: str, state: RunState) -> str | None:
    """Writes run_dir/model where the recipe asks for it, and returns its path."""
    if not run.recipe.checkpoint.save_hf:
        return None
    with run.phase("export"):
        name = own_role(run.recipe)
        role = role_of(run.recipe, name, base)
        now = replace(state, choices=run.choices.to_json())
        card = card_of(run.directory, run.recipe, now, role.base, role=name, adapter=False)
        weights, to = job.tensors()[role.stem], run.directory.model
        role.export(weights, state.algorithm, to, run.choices, overwrite=True, card=card)
    _push(run, state)
    return str(run.directory.model)


def _push(run: Run, state: RunState) -> None:
    """Pushes the exported model where the recipe asks for it. A failure is logged and warned of,
    and ends neither the run nor its model.
    """
    settings, folder = run.recipe.checkpoint, run.directory.model
    if not settings.push_to_hub:
        return
    with run.phase("push"):
        message = f"step {state.step} of {run.directory.path.resolve().name}"
        try:
            done = push(
                folder, settings.push_to_hub, private=settings.push_private, message=message
            )
        except RunError as error:
            run.logs.event("push_failed", str(error))
            run.console.warn(str(error))
            return
    run.logs.event("pushed", done["url"], **done)
    run.console.note(f"pushed {folder} to {done['url']}")


def summarise(run: Run, state: RunState, model: str | None) -> dict[str, Any]:
    """The content of summary.json for a run that ended.

    seconds: of this process. accuracies, tokens per second and phase_seconds: of the whole run,
    also before a resume, but load, save and export are of this process. accuracy_before: at step 0,
    None where nothing was evaluated then. loss and kl: means over the last `LAST` steps. phases:
    estimate and measurement of each phase (`Estimates.beside`). model: the exported directory.
    """
    directory = run.directory.path
    metrics = list(read_steps(directory / "metrics.jsonl"))
    evaluations = list(read_steps(directory / "eval.jsonl"))
    return {
        "job": run.recipe.job,
        "run_dir": str(directory),
        "steps": state.step,
        "updates": state.update,
        "episodes": state.episodes,
        **_changes(evaluations),
        **_unrated(run.recipe),
        "loss": _mean(line.get("loss") for line in metrics[-LAST:]),
        **_kl(metrics, getattr(run.recipe.algorithm, "kl_target", None)),
        "evaluations": dict(state.evaluations),
        "best": state.best and state.best.to_json(),
        "seconds": round(run.clock.seconds, 3),
        "phase_seconds": _phases(run, [*metrics, *evaluations]),
        "phases": run.estimates.beside(run.recipe, metrics, run.clock.peaks.total),
        **_speeds(metrics),
        "peak_memory_bytes": run.measure_memory(),
        "model": model,
        **_mirrored(run, state),
    }


def _mirrored(run: Run, state: RunState) -> dict[str, Any]:
    """Under "mirror" its URL, the newest step that it has, None without one, and whether the run's
    last checkpoint is not there; {} without a mirror.
    """
    record = record_of(run.directory) if run.recipe.checkpoint.mirror else None
    if record is None:
        return {}
    newest = max(record.steps, default=None)
    behind = bool(state.step) and state.step not in record.steps
    return {"mirror": {"url": record.url, "step": newest, "behind": behind}}


def is_behind(summary: Mapping[str, Any]) -> bool:
    """Whether a run, or a stage of a pipeline, ended with a mirror that lacks its last checkpoint:
    whoever gives its machine back now loses steps.
    """
    stages: Mapping[str, Mapping[str, Any]] = summary.get("stages") or {}
    mirrors = (part.get("mirror") for part in (summary, *stages.values()))
    return any(mirror["behind"] for mirror in mirrors if mirror)


def table(summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The summary as rows (name, value) for the console."""
    changes = ((name, change(summary, metric)) for metric, name in CHANGING.items())
    rows = [(label, value) for label, value in changes if value]
    rows += [
        ("steps", f"{summary['steps']} ({how_many(summary['updates'], 'update')})"),
        ("samples", f"{summary['episodes']}"),
        *_times(summary),
    ]
    for name in TOKENS:
        if name in summary:
            quantity = name.removesuffix("_tokens_per_second")
            rows.append((f"{quantity} speed", f"{summary[name]:,.0f} tokens/s"))
    rows.append(("peak memory", f"{summary['peak_memory_bytes'] / 2**30:.2f} GiB"))
    if summary["model"]:
        rows.append(("model", summary["model"]))
    if mirror := summary.get("mirror"):
        newest = "nothing" if mirror["step"] is None else f"step {mirror['step']}"
        has = f"is behind: it has {newest}" if mirror["behind"] else f"has {newest}"
        rows.append(("mirror", f"{mirror['url']} {has}"))
    return rows


def whole_seconds(summary: Mapping[str, Any]) -> float:
    """Seconds of all processes of a run. The sum of the phases where that exceeds the time of the
    last process, because the run was resumed.
    """
    phases: Mapping[str, float] = summary["phase_seconds"]
    last_process: float = summary["seconds"]
    all_phases = sum(phases.values())
    return all_phases if all_phases > last_process + 1 else last_process


def _times(summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    total, last_process = whole_seconds(summary), summary["seconds"]
    last = f" ({last_process:.0f} s since the last resume)" if total > last_process else ""
    phases: Mapping[str, float] = summary["phase_seconds"]
    rows = [(f"  {name}", f"{value:.1f} s") for name, value in phases.items()]
    return [("time", f"{total:.0f} s{last}"), *rows]


def change(summary: Mapping[str, Any], metric: str) -> str:
    """ "0.120 → 0.870" where a metric was evaluated before and after training, "0.870" where only
    after, else "". Rates that mean nothing are "".
    """
    if metric in RATES and not summary.get("rated", True):
        return ""
    before, after = summary.get(f"{metric}_before"), summary.get(f"{metric}_after")
    if after is None:
        return ""
    return f"{after:.3f}" if before is None else f"{before:.3f} → {after:.3f}"


def _unrated(recipe: Recipe) -> dict[str, Any]:
    """ "rated": false where no accuracy means anything."""
    answers = isinstance(recipe, Answering) and rates_mean_nothing(recipe.eval, recipe.rewards)
    return {"rated": False} if answers else {}


def _changes(evaluations: list[dict[str, Any]]) -> dict[str, Any]:
    """METRIC_before (step 0) and METRIC_after (the last evaluation) of the first evaluation set,
    and under "rewards" the same of each component of the reward.
    """
    if not evaluations:
        return {}
    first_set = [line for line in evaluations if set_of(line) == set_of(evaluations[0])]
    first, last = first_set[0] if first_set[0]["step"] == 0 else {}, first_set[-1]
    changes: dict[str, Any] = {}
    for metric in CHANGING:
        if metric in last:
            changes |= {f"{metric}_before": first.get(metric), f"{metric}_after": last[metric]}
    components = [name for name in last if name.startswith("reward/")]
    if components:
        changes["rewards"] = {
            name.removeprefix("reward/"): {"before": first.get(name), "after": last[name]}
            for name in components
        }
    return changes


def _kl(metrics: list[dict[str, Any]], target: float | None) -> dict[str, Any]:
    """The KL in nats of the sampling policies from the reference, where the reward holds a KL
    penalty; else {}.

    token and sequence: means over the last `LAST` steps; token_most: the most of any step. target:
    the KL that the coefficient was adapted to, None where the coefficient is fixed.
    """
    lines = [line for line in metrics if line.get("kl/token_mean") is not None]
    if not lines:
        return {}
    return {
        "kl": {
            "token": _mean(line["kl/token_mean"] for line in lines[-LAST:]),
            "token_most": max(line["kl/token_mean"] for line in lines),
            "sequence": _mean(line.get("kl/sequence_mean") for line in lines[-LAST:]),
            "coefficient": lines[-1].get("kl/coefficient"),
            "target": target,
        }
    }


def _mean(values: Iterable[float | None]) -> float | None:
    """The mean without None: steps in which the policy waits for its critic have no loss."""
    numbers = [value for value in values if value is not None]
    return sum(numbers) / len(numbers) if numbers else None


def _phases(run: Run, lines: list[dict[str, Any]]) -> dict[str, float]:
    """Seconds by phase, in the order in which a run goes through them."""
    by_phase: dict[str, float] = {}
    for phase in PHASES:
        if phase in ("load", "save", "export"):
            seconds = run.clock.total.get(phase, 0.0)
        else:
            seconds = sum(line.get(f"{phase}_seconds") or 0.0 for line in lines)
        if seconds:
            by_phase[phase] = round(seconds, 3)
    return by_phase


def _speeds(metrics: list[dict[str, Any]]) -> dict[str, float]:
    speeds: dict[str, float] = {}
    for name, (tokens, seconds) in TOKENS.items():
        counts = [v for line in metrics for key, v in line.items() if tokens.fullmatch(key)]
        written = sum(value for value in counts if value is not None)
        spent = sum(line.get(part) or 0.0 for line in metrics for part in seconds)
        if written and spent:
            speeds[name] = round(written / spent, 1)
    return speeds
