"""Results of `postgrad eval` as JSON values, and as tables of one model or of two compared."""

import math
from collections.abc import Sequence
from typing import Any

from postgrad.evaluation.results import (
    LEFT_OUT,
    LOSSES,
    Comparison,
    EvaluatedProblem,
    Result,
    ends,
    plus_minus,
)
from postgrad.observe.console import Console
from postgrad.recipe.recipe import Recipe, RLRecipe

SHOWN = 5  # rows where two models differ
WIDTH = 60  # characters of a question or of the end of an answer


def results_json(recipe: Recipe, results: list[Result]) -> dict[str, Any]:
    """The first set's results at the top level, those of all sets under "sets"."""
    first = results[0]
    report: dict[str, Any] = {}
    if "accuracy" in first.metrics:
        report["accuracy"] = first.metrics["accuracy"]
        report |= ends("accuracy", first.intervals["accuracy"])
    report |= {name: first.metrics[name] for name in LOSSES if name in first.metrics}
    if "loss" in first.intervals:
        report |= ends("loss", first.intervals["loss"])
    report |= {"rows": first.rows, "failed": first.failed}
    if isinstance(recipe, RLRecipe):
        sampling = recipe.eval.samplings[0]
        report["pass@k"] = {
            str(k): first.metrics["accuracy" if k == 1 else f"pass@{k}"] for k in sampling.pass_at
        }
        if sampling.maj_at:
            report["maj@k"] = {str(k): first.metrics[f"maj@{k}"] for k in sampling.maj_at}
        report["left_out@k"] = {
            str(k): int(first.metrics[f"{LEFT_OUT}{k}"])
            for k in dict.fromkeys((*sampling.pass_at, *sampling.maj_at))
        }
    return {**report, "sets": [result.to_json() for result in results]}


def show_results(
    by_model: Sequence[Sequence[Result]], comparisons: Sequence[Comparison], console: Console
) -> None:
    """Prints a row for each set and metric, with a column for each model and, for two models, their
    difference. by_model: the results of each model, in the order of the sets.
    """
    columns = ["", "model", *(("against", "difference", "p") if comparisons else ())]
    rows: list[list[str]] = []
    for place, several in enumerate(zip(*by_model, strict=True)):
        name = several[0].name
        compared = comparisons[place] if comparisons else None
        for metric in _metrics(several):
            row = [metric if name is None else f"{name} {metric}"]
            row += [_value(result, metric) for result in several]
            rows.append(row + (_difference(several, metric, compared) if compared else []))
        counts = [f"{result.rows} / {result.failed}" for result in several]
        rows.append(["rows / failed", *counts, *[""] * (len(columns) - 1 - len(counts))])
    console.table("evaluation", columns, rows)


def _metrics(several: Sequence[Result]) -> list[str]:
    """The metric names of a set's results by all models: one may lack a dataset whose rows are all
    too long for it.
    """
    return list(dict.fromkeys(metric for result in several for metric in result.metrics))


def _value(result: Result, metric: str) -> str:
    value = result.metrics.get(metric, math.nan)
    text = f"{value:.3f}" if metric in result.intervals else f"{value:.4g}"
    return "–" if math.isnan(value) else text + plus_minus(value, result.intervals.get(metric))


def _difference(several: Sequence[Result], metric: str, compared: Comparison) -> list[str]:
    """Two table cells: the paired difference with its interval, and its p-value. Metrics that are
    no rates have the plain difference alone.
    """
    difference = compared.differences.get(metric)
    if difference is None or not difference.rows:
        ours, theirs = (result.metrics.get(metric, math.nan) for result in several)
        return ["–" if math.isnan(ours - theirs) else f"{ours - theirs:+.3g}", ""]
    return [
        f"{difference.value:+.3f}{plus_minus(difference.value, difference.interval)}",
        f"{difference.p_value:.2g}",
    ]


def show_differing(compared: Comparison, console: Console) -> None:
    """Prints the first `SHOWN` rows where the models differ, with the answers of both."""
    if compared.unpaired:
        console.warn(
            f"{compared.unpaired} rows were asked of one model only, because they are too long for "
            "the other's tokenizer: they are in no difference; raise eval.max_len"
        )
    pairs = compared.differing()
    if not pairs:
        return
    name = "" if compared.name is None else f"{compared.name}: "
    metric = compared.judged_by
    rows = [
        [str(ours.row), _short(ours.question), _answer(ours, metric), _answer(theirs, metric)]
        for ours, theirs in pairs[:SHOWN]
    ]
    title = f"{name}{len(pairs)} of {len(compared.pairs)} rows differ in {metric}"
    console.table(title, ["row", "question", "model", "against"], rows)


def _answer(problem: EvaluatedProblem, metric: str) -> str:
    return f"{problem.value(metric):.3g}: {_short(problem.text)}"


def _short(text: str) -> str:
    """The text in one line of at most `WIDTH` characters. Long texts keep their end, where the
    question is asked or the answer given.
    """
    line = " ".join(text.split())
    return line if len(line) <= WIDTH else "…" + line[1 - WIDTH :]
