"""`postgrad plan`: what a recipe will do on some hardware, before any weight is loaded."""

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from postgrad.core.errors import UsageError
from postgrad.models.known_shapes import shape_of_model
from postgrad.models.settings import ModelSettings
from postgrad.observe.console import Console
from postgrad.plan.advice import advise
from postgrad.plan.calibration import calibration_file, read, settled
from postgrad.plan.change import long_as
from postgrad.plan.hardware import Hardware, parse_hardware, this_machine, with_threads
from postgrad.plan.held import PHASES
from postgrad.plan.lengths import row_lengths
from postgrad.plan.page import Page, advice_rows
from postgrad.plan.plan import Facts, make_plan
from postgrad.plan.search import search, search_note, search_rows, split_note, split_rows
from postgrad.plan.splits import fitting_splits
from postgrad.recipe.load import load_recipe, require_models, stage_named, write_changed
from postgrad.recipe.overrides import last_of_each
from postgrad.recipe.pipeline import Pipeline, load_pipeline, with_rows
from postgrad.recipe.recipe import Recipe

MOST_ROWS = 10**12
COLUMNS = 77  # of a command's line, beside what continues it


def plan(
    path: Path,
    overrides: Sequence[str],
    console: Console,
    *,
    hardware: str | None = None,
    fit: Path | None = None,
    searching: bool = False,
    rows: int | None = None,
) -> dict[str, Any]:
    """The plan of the recipe at `path`, or of each in a folder with pipeline.toml, as tables and as
    JSON values.

    hardware: "8xA100-80G"; where left out, this machine. fit: the file to which the recipe with
    all advice is written. searching: also search the hardware on which the recipe fits. rows: of an
    epoch, in place of the counted ones. Raises UsageError where a recipe is wrong, or the shape of
    a model cannot be found.
    """
    if rows is not None and not 1 <= rows <= MOST_ROWS:
        raise UsageError(f"--rows {rows}: a number from 1 to {MOST_ROWS} is expected")
    available = parse_hardware(hardware) if hardware else this_machine()
    if path.is_dir():
        if fit is not None:
            raise UsageError("--fit writes one recipe: name a TOML file, not a folder")
        if rows is not None:
            raise UsageError("--rows is of the data of one recipe: name a TOML file, not a folder")
        return _stages(load_pipeline(path, overrides), available, console, searching=searching)
    recipe = load_recipe(path, overrides)
    require_models(recipe)
    recipe, facts = facts_of(recipe, available)
    report, page = _shown(recipe, replace(facts, rows=rows), console, searching=searching)
    if fit is not None:
        changed = [flag for advice in page.advice for flag in advice.overrides]
        write_changed(path, [*overrides, *changed], fit)
        console.note(f"wrote {fit}: {path} with all of that")
    if page.advice:
        report["as_advised"] = _as_advised(path, overrides, page, console)
    return report


def _as_advised(
    path: Path, overrides: Sequence[str], page: Page, console: Console
) -> dict[str, Any]:
    """Prints the command that follows all of the advice, with what its plan says; the same as JSON
    values.
    """
    advised = [word for step in page.advice for word in step.overrides]
    words = last_of_each([*overrides, *advised])
    start = ["postgrad", "train", str(path)]
    after = Page(page.advice[-1].after, ())
    console.note(f"as advised it {after.verdict()}:")
    console.note(_folded(start, words))
    return {
        "command": shlex.join([*start, *words]),
        "verdict": after.verdict(),
        **after.plan.timing.to_json(),
    }


def _folded(start: Sequence[str], flags: Sequence[str]) -> str:
    """A command on lines of a shell's, each flag beside its value, within eighty columns where that
    can be done.
    """
    lines = [shlex.join(start)]
    for place in range(0, len(flags), 2):
        pair = shlex.join(flags[place : place + 2])
        if len(lines[-1]) + len(pair) < COLUMNS:
            lines[-1] += f" {pair}"
        else:
            lines.append(f"  {pair}")
    return " \\\n".join(lines)


def _stages(
    pipeline: Pipeline, hardware: Hardware, console: Console, *, searching: bool
) -> dict[str, Any]:
    """A plan for each recipe of a pipeline, and the sums: the recipes run one after the other."""
    models: dict[str, ModelSettings] = {}
    plans: dict[str, dict[str, Any]] = {}
    generating = {each.name: each for each in pipeline.stages if each.generate is not None}
    for stage in pipeline.stages:
        console.heading(f"{stage.name}: {stage.path}")
        if stage.generate is not None:
            console.note("samples answers and trains nothing: its time and memory are not planned")
            plans[stage.name] = {"fits": None, "hours": None, "devices": 1}
            continue
        rows = {name: str(each.rows) for name, each in generating.items() if each.rows.is_file()}
        planned = facts_of(with_rows(stage.recipe, rows), hardware, models)
        plans[stage.name], _ = _shown(*planned, console, searching=searching)
        models[stage.name] = start_of(stage.recipe.model, models)
    hours = [report["hours"] for report in plans.values()]
    total = None if None in hours else sum(hours)
    misfits = [name for name, report in plans.items() if report["fits"] is False]
    word = f"{' and '.join(misfits)} will not fit" if misfits else "everything fits"
    endless = [name for name, report in plans.items() if report["hours"] is None]
    long = (
        f"; hours of {' and '.join(endless)} unknown"
        if total is None
        else f"; {long_as(total)} in all"
    )
    console.note(f"{pipeline.name}: {word}{long}")
    return {
        "fits": not misfits,
        "hours": total,
        "devices": max(report["devices"] for report in plans.values()),
        "stages": plans,
    }


def _shown(
    recipe: Recipe, facts: Facts, console: Console, *, searching: bool
) -> tuple[dict[str, Any], Page]:
    """Plans one recipe and prints that; the plan as JSON values and as a page."""
    page = page_of(recipe, facts)
    show(page, console)
    report = page.to_json()
    if searching:
        offers = search(recipe, facts)
        console.table("hardware on which the recipe fits", *search_rows(offers))
        console.note(search_note(offers))
        report["search"] = [offer.to_json() for offer in offers]
        if recipe.trains_on_rollouts and facts.hardware.count > 1:
            splits = fitting_splits(recipe, facts.hardware.count, facts)
            console.table("cards for learner and engines, the fastest first", *split_rows(splits))
            console.note(split_note(splits, facts.hardware))
            report["splits"] = [split.to_json() for split in splits]
    return report, page


def start_of(model: ModelSettings, models: Mapping[str, ModelSettings]) -> ModelSettings:
    """The model that the weights of a pipeline's stage (`@NAME`) started from, which has the same
    shape and tokenizer. models: by stage.
    """
    name = stage_named(model.path)
    return model if name is None else models.get(name, model)


def facts_of(
    recipe: Recipe, hardware: Hardware, models: Mapping[str, ModelSettings] = MappingProxyType({})
) -> tuple[Recipe, Facts]:
    """The recipe with what measured runs settle of it, and the facts for its plan: lengths of its
    data, what runs have measured. models: of the stages before it in a pipeline. Raises UsageError
    where the data or the calibration cannot be read.
    """
    measured = read(calibration_file())
    recipe = settled(recipe, hardware.device, measured)
    hardware = with_threads(hardware, recipe.learner.threads)
    lengths = row_lengths(recipe, start_of(recipe.model, models))
    return recipe, Facts(
        lambda model: shape_of_model(start_of(model, models)),
        hardware,
        lengths=lengths,
        calibration=measured,
    )


def page_of(recipe: Recipe, facts: Facts) -> Page:
    """The plan with its advice. Raises UsageError where the shape of a model cannot be found."""
    start = make_plan(recipe, facts)
    return Page(start, advise(start, facts))


def show(page: Page, console: Console) -> None:
    """Prints the page on a console."""
    console.note(page.verdict())
    for line in page.summary():
        console.note(line)
    console.table(page.cards_title(), ("cards", "work", *PHASES, "free"), page.card_rows())
    console.table("batches", ("", "", ""), page.batch_rows())
    for title, rows in page.memory_tables():
        console.table(title, ("role", "what", *PHASES), rows)
    console.table("time", ("phase", "seconds", "share", "cards"), page.time_rows())
    for note in page.notes():
        console.note(note)
    if page.advice:
        console.table(
            "advice, each on top of those before",
            ("", "change", "effect"),
            advice_rows(page.advice),
        )
