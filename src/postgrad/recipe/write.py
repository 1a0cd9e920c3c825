"""A recipe file with other values, its comments and order kept."""

from collections.abc import Sequence
from pathlib import Path

import tomlkit

from postgrad.core.errors import UsageError
from postgrad.core.files import write_text
from postgrad.recipe.load import load_recipe, read_text
from postgrad.recipe.overrides import change, parse_overrides


def write_changed(path: Path, overrides: Sequence[str], to: Path) -> None:
    """Writes the recipe at `path` with `--section.key value` overrides to the file `to`.

    Raises UsageError where the result is no recipe, and where `to` is there already: nobody's
    recipe is written over.
    """
    if to.exists():
        raise UsageError(f"{to} is there already: choose another name for the changed recipe")
    load_recipe(path, overrides)  # raises where they make no recipe, before anything is written
    document = tomlkit.parse(read_text(path))
    change(document, parse_overrides(overrides))
    write_text(to, tomlkit.dumps(document))
