"""`postgrad train RECIPE --dry-run`: one recipe, or the stages of a pipeline."""

import os
import signal
import tempfile
import threading
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from postgrad.jobs.dry_run import ahead, answers, data, models
from postgrad.jobs.dry_run.report import Report
from postgrad.jobs.dry_run.smaller import smaller
from postgrad.jobs.dry_run.trial import Trial, try_run
from postgrad.observe.console import Console
from postgrad.plan.page import Page
from postgrad.recipe.load import names_used, require_runnable
from postgrad.recipe.pipeline import Pipeline, Stage, with_models
from postgrad.recipe.recipe import Answering, Recipe

PREFIX = ".postgrad-dry-run-"


def dry_run(recipe: Recipe, console: Console, *, tracebacks: bool = False) -> Report:
    """The plan, all rows, then one small step of everything, in a folder that is removed.

    What would have failed is in the report and never raised. run_dir is not touched.
    """
    report = Report(console, tracebacks)
    with _scratch(Path(recipe.run_dir)) as folder:
        _try(report, recipe, folder)
    report.show()
    return report


def dry_run_pipeline(
    pipeline: Pipeline, console: Console, *, tracebacks: bool = False
) -> dict[str, Report]:
    """A report for each stage. One that starts from an earlier one's model starts from what that
    one's small run exported; where there is none, it is not tried.
    """
    reports: dict[str, Report] = {}
    found: dict[str, str] = {}
    with _scratch(pipeline.run_dir) as folder:
        for stage in pipeline.stages:
            console.heading(f"{stage.name}: {stage.path}")
            report = reports[stage.name] = Report(console, tracebacks)
            (folder / stage.name).mkdir()
            recipe = _started(report, stage, found)
            trial = None if recipe is None else _try(report, recipe, folder / stage.name)
            if trial is not None and trial.model is not None:
                found[stage.name] = str(trial.model)
            report.show()
    return reports


def pipeline_json(reports: dict[str, Report]) -> dict[str, Any]:
    """Every stage's report, and the problems of all, each with its stage."""
    found: dict[str, Any] = {"stages": {name: one.to_json() for name, one in reports.items()}}
    for what in ("problems", "warnings"):
        found[what] = [
            {"stage": name, **problem}
            for name, one in found["stages"].items()
            for problem in one[what]
        ]
    return found


def exit_code(reports: Sequence[Report]) -> int:
    """Of the worst one."""
    return max((one.exit_code for one in reports), default=0)


def _started(report: Report, stage: Stage, exported: dict[str, str]) -> Recipe | None:
    """The stage's recipe with the models of earlier ones; None where one of them has none."""
    missing = [name for _, name in names_used(stage.recipe) if name not in exported]
    if not missing:
        return with_models(stage.recipe, exported)
    report.skip("recipe", f"the stage {missing[0]}, from whose model it starts, gave none")
    return None


def _try(report: Report, recipe: Recipe, folder: Path) -> Trial | None:
    """Everything that can be tried, each after what it needs. None: the small run was not."""
    with report.check("recipe") as check:
        require_runnable(recipe)
    page = ahead.plan(report, recipe)
    ahead.place(report, recipe)
    ahead.loggers(report, recipe)
    if not check.ok:
        report.skip("rows", "the recipe cannot be run")
        return None
    start = models.reach(report, recipe, folder / "init")
    if start is None:
        report.skip("rows", "there is no tokenizer to read them with")
        return None
    path, tokenizer = start
    sets = data.read(report, recipe, tokenizer)
    models.look_at_tokens(report, recipe, path, tokenizer, sets)
    if isinstance(recipe, Answering) and recipe.rewards:
        answers.try_answers(report, recipe, sets.prompts(), tokenizer)
        ahead.answers_fit(report, recipe, sets, tokenizer)
    if sets.training is None:
        report.skip("load", "there are no rows to train on")
        return None
    data.show(report, recipe, sets, tokenizer)
    ahead.batches(report, recipe, sets, page)
    if reason := _in_the_way(recipe, sets, page):
        report.skip("load", reason)
        return None
    return _run_small(report, recipe, sets, path, folder, page)


def _run_small(
    report: Report,
    recipe: Recipe,
    sets: data.Sets,
    path: str,
    folder: Path,
    page: Page | None,
) -> Trial | None:
    small = _smaller(report, recipe, sets, path, folder)
    if small is None:
        return None
    trial = try_run(report, small, folder / "model")
    if trial.checkpoint_bytes:
        ahead.best_metric(report, recipe, trial.measured, sets)
        ahead.disk(report, recipe, trial.checkpoint_bytes, trial.model_bytes, page)
    return trial


def _smaller(
    report: Report, recipe: Recipe, sets: data.Sets, path: str, folder: Path
) -> Recipe | None:
    with report.check("small recipe") as check:
        small = smaller(recipe, sets, folder / "run", path)
        check.detail = f"{small.geometry().train_batch_size} samples in its update"
        return small
    return None


def _in_the_way(recipe: Recipe, sets: data.Sets, page: Page | None) -> str | None:
    """Why the small run would only fail again, or take the machine with it."""
    if len(sets.evaluation) < len(recipe.eval.sets):
        return "an evaluation set cannot be read"
    if page is not None and not page.outlook.fits and page.outlook.hardware.device.is_cpu:
        return "the plan does not fit, and a CPU without memory takes the whole machine with it"
    return None


@contextmanager
def _scratch(run_dir: Path) -> Generator[Path]:
    """A folder on the disk of run_dir, or where temporary files are if that cannot be written to;
    it is gone at the end, also of SIGTERM.
    """
    beside = ahead.existing(run_dir).parent if run_dir.exists() else ahead.existing(run_dir)
    home = beside if os.access(beside, os.W_OK | os.X_OK) and beside.is_dir() else None
    with _terminable(), tempfile.TemporaryDirectory(prefix=PREFIX, dir=home) as folder:
        yield Path(folder)


@contextmanager
def _terminable() -> Generator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, _end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _end(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt
