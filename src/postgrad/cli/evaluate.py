"""eval: what a model can do."""

import argparse
from typing import Any

from postgrad.cli.command import Commands, add_quiet, console_of
from postgrad.core.imports import heavy_imports


def add(commands: Commands) -> None:
    """The family's commands and their flags."""
    one = commands.add_for_recipe("eval", _eval, "evaluate a model on the recipe's evaluation sets")
    one.add_argument("--model", required=True, help="Hugging Face directory or hub id")
    one.add_argument("--against", help="a second model, side by side")
    add_quiet(one)


def _eval(known: argparse.Namespace, rest: list[str]) -> Any:
    from postgrad.recipe.load import load_recipe

    recipe = load_recipe(known.recipe, rest)
    with heavy_imports():
        from postgrad.jobs.evaluate import evaluate

    return evaluate(recipe, known.model, console_of(known), known.against)
