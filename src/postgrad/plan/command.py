"""`postgrad plan`: what a recipe will do on some hardware, told before a weight is loaded."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from postgrad.models.known_shapes import shape_of_model
from postgrad.observe.console import Console
from postgrad.plan.advice import advise
from postgrad.plan.calibration import calibration_file, read, settled
from postgrad.plan.hardware import Hardware, parse_hardware, this_machine, with_threads
from postgrad.plan.page import Page, advice_rows
from postgrad.plan.phases import PHASES
from postgrad.plan.plan import Facts, outlook
from postgrad.plan.row_lengths import row_lengths
from postgrad.plan.search import search, search_note, search_rows
from postgrad.recipe.load import load_recipe
from postgrad.recipe.recipe import Recipe
from postgrad.recipe.write import write_changed


def plan(
    path: Path,
    overrides: Sequence[str],
    console: Console,
    *,
    hardware: str | None = None,
    fit: Path | None = None,
    searching: bool = False,
) -> dict[str, Any]:
    """The plan of the recipe at `path`, as tables and as JSON values.

    hardware: "8xA100-80G"; this machine where left out. fit: where the recipe with all advice is
    written. searching: also which hardware of the table would do, and what it costs. Raises
    UsageError where the recipe is wrong, or a model's shape is nowhere to be had.
    """
    recipe, facts = facts_of(
        load_recipe(path, overrides), parse_hardware(hardware) if hardware else this_machine()
    )
    page = page_of(recipe, facts)
    show(page, console)
    report = page.to_json()
    if fit is not None:
        changed = [flag for one in page.advice for flag in one.overrides]
        write_changed(path, [*overrides, *changed], fit)
        console.note(f"wrote {fit}: {path} with all of that")
    if searching:
        offers = search(recipe, facts)
        console.table("hardware that does, the recipe as it is", *search_rows(offers))
        console.note(search_note(offers))
        report["search"] = [one.to_json() for one in offers]
    return report


def facts_of(recipe: Recipe, hardware: Hardware) -> tuple[Recipe, Facts]:
    """What is known of a recipe on some hardware: lengths of its data, what runs have shown; and
    the recipe, as settled as those runs settle it. Raises UsageError as those do.
    """
    shown = read(calibration_file())
    recipe = settled(recipe, hardware.device, shown)
    hardware = with_threads(hardware, recipe.learner.threads)
    lengths = row_lengths(recipe)
    return recipe, Facts(shape_of_model, hardware, lengths=lengths, calibration=shown)


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
