"""eval: what a model can do."""

import argparse
from typing import Any

from postgrad.cli.command import Commands, add_quiet, console_of
from postgrad.core.process import heavy_imports


def add(commands: Commands) -> None:
    """Registers the commands of this file and their flags."""
    parser = commands.add_for_recipe(
        "eval", _eval, "evaluate a model on the recipe's evaluation sets"
    )
    parser.add_argument("--model", required=True, help="Hugging Face directory or hub id")
    parser.add_argument("--against", help="a second model, side by side")
    add_quiet(parser)


def _eval(args: argparse.Namespace, rest: list[str]) -> Any:
    from postgrad.recipe.load import load_recipe

    recipe = load_recipe(args.recipe, rest)
    with heavy_imports():
        from postgrad.tools.evaluate import evaluate

    return evaluate(recipe, args.model, console_of(args), args.against)
