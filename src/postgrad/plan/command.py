"""`postgrad plan`: what a recipe will do on some hardware, told before a weight is loaded."""

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
from postgrad.plan.hardware import Hardware, parse_hardware, this_machine, with_threads
from postgrad.plan.page import Page, advice_rows
from postgrad.plan.phases import PHASES
from postgrad.plan.plan import Facts, outlook
from postgrad.plan.row_lengths import row_lengths
from postgrad.plan.search import search, search_note, search_rows
from postgrad.recipe.load import load_recipe, require_models, stage_named
from postgrad.recipe.pipeline import Pipeline, load_pipeline
from postgrad.recipe.recipe import Recipe
from postgrad.recipe.write import write_changed

MOST_ROWS = 10**12


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

    hardware: "8xA100-80G"; this machine where left out. fit: where the recipe with all advice is
    written. searching: also which hardware of the table would do, and what it costs. rows: of an
    epoch, in place of those that are counted. Raises UsageError where a recipe is wrong, or a
    model's shape is nowhere to be had.
    """
    if rows is not None and not 1 <= rows <= MOST_ROWS:
        raise UsageError(f"--rows {rows}: a number from 1 to {MOST_ROWS} is wanted")
    found = parse_hardware(hardware) if hardware else this_machine()
    if path.is_dir():
        if fit is not None:
            raise UsageError("--fit writes one recipe: name a TOML file, not a folder")
        if rows is not None:
            raise UsageError("--rows is of the data of one recipe: name a TOML file, not a folder")
        return _stages(load_pipeline(path, overrides), found, console, searching=searching)
    recipe = load_recipe(path, overrides)
    require_models(recipe)
    recipe, facts = facts_of(recipe, found)
    report, page = _shown(recipe, replace(facts, rows=rows), console, searching=searching)
    if fit is not None:
        changed = [flag for one in page.advice for flag in one.overrides]
        write_changed(path, [*overrides, *changed], fit)
        console.note(f"wrote {fit}: {path} with all of that")
    return report


def _stages(
    pipeline: Pipeline, hardware: Hardware, console: Console, *, searching: bool
) -> dict[str, Any]:
    """A plan for each recipe of a pipeline, and what holds of all: they run one after the other."""
    models: dict[str, ModelSettings] = {}
    plans: dict[str, dict[str, Any]] = {}
    for stage in pipeline.stages:
        console.heading(f"{stage.name}: {stage.path}")
        planned = facts_of(stage.recipe, hardware, models)
        plans[stage.name], _ = _shown(*planned, console, searching=searching)
        models[stage.name] = made_from(stage.recipe.model, models)
    hours = [one["hours"] for one in plans.values()]
    whole = None if None in hours else sum(hours)
    misfits = [name for name, one in plans.items() if not one["fits"]]
    word = f"{' and '.join(misfits)} will not fit" if misfits else "everything fits"
    endless = [name for name, one in plans.items() if one["hours"] is None]
    long = (
        f"; hours of {' and '.join(endless)} unknown"
        if whole is None
        else f"; {whole:.2f} h in all"
    )
    console.note(f"{pipeline.name}: {word}{long}")
    return {
        "fits": not misfits,
        "hours": whole,
        "devices": max(one["devices"] for one in plans.values()),
        "stages": plans,
    }


def _shown(
    recipe: Recipe, facts: Facts, console: Console, *, searching: bool
) -> tuple[dict[str, Any], Page]:
    """One recipe's plan, on the console too."""
    page = page_of(recipe, facts)
    show(page, console)
    report = page.to_json()
    if searching:
        offers = search(recipe, facts)
        console.table("hardware that does, the recipe as it is", *search_rows(offers))
        console.note(search_note(offers))
        report["search"] = [one.to_json() for one in offers]
    return report, page


def made_from(model: ModelSettings, models: Mapping[str, ModelSettings]) -> ModelSettings:
    """What the weights of a pipeline's stage (`@NAME`) began as: of the same shape, with the same
    tokenizer.
    """
    name = stage_named(model.path)
    return model if name is None else models.get(name, model)


def facts_of(
    recipe: Recipe, hardware: Hardware, models: Mapping[str, ModelSettings] = MappingProxyType({})
) -> tuple[Recipe, Facts]:
    """What is known of a recipe on some hardware: lengths of its data, what runs have shown; and
    the recipe, as settled as those runs settle it. models: of the stages before it in a pipeline.
    Raises UsageError as those do.
    """
    shown = read(calibration_file())
    recipe = settled(recipe, hardware.device, shown)
    hardware = with_threads(hardware, recipe.learner.threads)
    lengths = row_lengths(recipe, made_from(recipe.model, models))
    return recipe, Facts(
        lambda model: shape_of_model(made_from(model, models)),
        hardware,
        lengths=lengths,
        calibration=shown,
    )


def page_of(recipe: Recipe, facts: Facts) -> Page:
    """The plan with its advice. Raises UsageError where a model's shape is not to be had."""
    start = outlook(recipe, facts)
    return Page(start, advise(start, facts))


def show(page: Page, console: Console) -> None:
    """The page on a console."""
    console.note(page.verdict())
    console.table("batches", ("", "", ""), page.batch_rows())
    console.table("memory of one device, GB", ("role", "what", *PHASES), page.memory_rows())
    console.table("time", ("phase", "seconds", "share"), page.time_rows())
    for note in page.notes():
        console.note(note)
    if page.advice:
        console.table(
            "advice, each on top of those before",
            ("", "change", "effect"),
            advice_rows(page.advice),
        )
