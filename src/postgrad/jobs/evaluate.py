"""`postgrad eval`: a model against the evaluation sets of a recipe, or two models side by side."""

import math
from typing import Any

from postgrad.core.errors import UsageError
from postgrad.jobs import environments, roles
from postgrad.jobs.assemble import check_answers
from postgrad.jobs.choices import choose
from postgrad.jobs.evaluation import Evaluator, Result
from postgrad.models.load import load_tokenizer
from postgrad.observe.console import Console
from postgrad.parallel import device as placing
from postgrad.recipe.recipe import Recipe, RLRecipe


def evaluate(
    recipe: Recipe, model: str, console: Console, against: str | None = None
) -> dict[str, Any]:
    """accuracy, rows, failed and, for rl jobs, pass@k of the first set; `sets` has all of them.

    against: a second model, whose results stand under "against" with the same prompts and random
    numbers. Raises UsageError where the recipe has no evaluation set.
    """
    if not recipe.eval.sets:
        raise UsageError("the recipe has nothing to evaluate on: give [eval] a path")
    found = {
        name: _results(recipe, name, console) for name in dict.fromkeys((model, against)) if name
    }
    _show(found, console)
    report = {"model": model, **_report(recipe, found[model])}
    if against is not None:
        report["against"] = {"model": against, **_report(recipe, found[against])}
    return report


def _results(recipe: Recipe, path: str, console: Console) -> list[Result]:
    choices = choose(recipe, {})
    placing.apply(choices.placement)
    tokenizer = load_tokenizer(path)
    with environments.scorer(recipe) as scorer:
        evaluator = Evaluator(recipe, tokenizer, scorer)
        for _, prompts in evaluator.sets:
            environments.check_rows(recipe, prompts)
            check_answers(scorer, prompts)
        engine, _ = roles.engine(
            recipe, path, choices, sequences=evaluator.sequences, max_len=evaluator.max_len
        )
        with console.phase(f"evaluate {path}", evaluator.total) as shown:
            return evaluator(engine, shown.advance)


def _report(recipe: Recipe, results: list[Result]) -> dict[str, Any]:
    first = results[0]
    report: dict[str, Any] = {
        "accuracy": first.metrics["accuracy"],
        "rows": first.rows,
        "failed": first.failed,
    }
    if isinstance(recipe, RLRecipe):
        report["pass@k"] = {
            str(k): first.metrics["accuracy" if k == 1 else f"pass@{k}"]
            for k in recipe.eval.pass_at
        }
    return {**report, "sets": [result.to_json() for result in results]}


def _show(found: dict[str, list[Result]], console: Console) -> None:
    """A line for each set and metric, a column for each model, and their difference."""
    columns = ["", *found]
    if len(found) == 2:
        columns.append("difference")
    rows: list[list[str]] = []
    for several in zip(*found.values(), strict=True):
        name = several[0].name
        for metric in several[0].metrics:
            values = [result.metrics[metric] for result in several]
            row = [metric if name is None else f"{name} {metric}", *map(_text, values)]
            if len(values) == 2:
                row.append(f"{values[1] - values[0]:+.4g}")
            rows.append(row)
        counts = [f"{one.rows} / {one.failed}" for one in several]
        rows.append(["rows / failed", *counts, *[""] * (len(several) - 1)])
    console.table("evaluation", columns, rows)


def _text(value: float) -> str:
    return "–" if math.isnan(value) else f"{value:.4g}"
