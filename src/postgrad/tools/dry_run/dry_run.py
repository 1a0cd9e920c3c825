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

from postgrad.observe.console import Console
from postgrad.plan.page import Page
from postgrad.recipe.load import names_used, require_runnable
from postgrad.recipe.pipeline import Pipeline, Stage, with_models
from postgrad.recipe.recipe import Answering, Recipe
from postgrad.tools.dry_run import ahead, answers, data, models
from postgrad.tools.dry_run.outcome import Report
from postgrad.tools.dry_run.smaller import small_recipe
from postgrad.tools.dry_run.trial import Trial, try_run

PREFIX = ".postgrad-dry-run-"


def dry_run(recipe: Recipe, console: Console, *, tracebacks: bool = False) -> Report:
    """Makes the plan, reads all rows, then runs one small step in a temporary folder.

    What would have failed stands in the report and is never raised. run_dir is not touched.
    """
    report = Report(console, tracebacks)
    with _scratch(Path(recipe.run_dir)) as folder:
        _run_checks(report, recipe, folder)
    report.show()
    return report


def dry_run_pipeline(
    pipeline: Pipeline, console: Console, *, tracebacks: bool = False
) -> dict[str, Report]:
    """Reports by stage name. A stage that starts from an earlier stage's model starts from what the
    earlier small run exported; where that exported none, the stage is not tried.
    """
    reports: dict[str, Report] = {}
    exported: dict[str, str] = {}
    with _scratch(pipeline.run_dir) as folder:
        for stage in pipeline.stages:
            console.heading(f"{stage.name}: {stage.path}")
            report = reports[stage.name] = Report(console, tracebacks)
            (folder / stage.name).mkdir()
            recipe = _started(report, stage, exported)
            trial = None if recipe is None else _run_checks(report, recipe, folder / stage.name)
            if trial is not None and trial.model is not None:
                exported[stage.name] = str(trial.model)
            report.show()
    return reports


def pipeline_json(reports: dict[str, Report]) -> dict[str, Any]:
    """The reports by stage name, and all problems and warnings, each with the name of its stage."""
    combined: dict[str, Any] = {
        "stages": {name: report.to_json() for name, report in reports.items()}
    }
    for severity in ("problems", "warnings"):
        combined[severity] = [
            {"stage": name, **problem}
            for name, report_json in combined["stages"].items()
            for problem in report_json[severity]
        ]
    return combined


def exit_code(reports: Sequence[Report]) -> int:
    """The highest exit code of the reports, 0 where there is none."""
    return max((report.exit_code for report in reports), default=0)


def _started(report: Report, stage: Stage, exported: dict[str, str]) -> Recipe | None:
    """The stage's recipe with the models that earlier stages exported; None where one of those
    exported none. exported: model directories by stage name.
    """
    missing = [name for _, name in names_used(stage.recipe) if name not in exported]
    if not missing:
        return with_models(stage.recipe, exported)
    report.skip("recipe", f"the stage {missing[0]}, from whose model it starts, gave none")
    return None


def _run_checks(report: Report, recipe: Recipe, folder: Path) -> Trial | None:
    """Runs every check, each after the ones that it needs; None where the small run was skipped."""
    with report.check("recipe") as check:
        require_runnable(recipe)
    page = ahead.check_plan(report, recipe)
    ahead.check_run_dir(report, recipe)
    ahead.check_loggers(report, recipe)
    if not check.ok:
        report.skip("rows", "the recipe cannot be run")
        return None
    start = models.check_models(report, recipe, folder / "init")
    if start is None:
        report.skip("rows", "there is no tokenizer to read them with")
        return None
    path, tokenizer = start
    sets = data.read_sets(report, recipe, tokenizer)
    models.check_tokens(report, recipe, path, tokenizer, sets)
    if isinstance(recipe, Answering) and recipe.rewards:
        answers.try_answers(report, recipe, sets.prompts(), tokenizer)
        ahead.check_answer_lengths(report, recipe, sets, tokenizer)
    if sets.training is None:
        report.skip("load", "there are no rows to train on")
        return None
    data.show_rows(report, recipe, sets, tokenizer)
    ahead.check_batches(report, recipe, sets, page)
    if reason := _reason_to_skip(recipe, sets, page):
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
    small = _make_small_recipe(report, recipe, sets, path, folder)
    if small is None:
        return None
    trial = try_run(report, small, folder / "model")
    if trial.checkpoint_bytes:
        ahead.check_best_metric(report, recipe, trial.measured, sets)
        ahead.check_disk(report, recipe, trial.checkpoint_bytes, trial.model_bytes, page)
    return trial


def _make_small_recipe(
    report: Report, recipe: Recipe, sets: data.Sets, path: str, folder: Path
) -> Recipe | None:
    with report.check("small recipe") as check:
        small = small_recipe(recipe, sets, folder / "run", path)
        check.detail = f"{small.geometry().train_batch_size} samples in its update"
        return small
    return None


def _reason_to_skip(recipe: Recipe, sets: data.Sets, page: Page | None) -> str | None:
    """Why the small run is not tried: it would fail like an earlier check, or exhaust the memory
    of the machine. None where it can be tried.
    """
    if len(sets.evaluation) < len(recipe.eval.sets):
        return "an evaluation set cannot be read"
    if page is not None and not page.outlook.fits and page.outlook.hardware.device.is_cpu:
        return "the plan does not fit, and a CPU without memory takes the whole machine with it"
    return None


@contextmanager
def _scratch(run_dir: Path) -> Generator[Path]:
    """A temporary folder on the disk of run_dir, or in the system's folder for them where that
    cannot be written. It is removed at the end, also after SIGTERM.
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
