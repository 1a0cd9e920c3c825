"""`postgrad translate`: a source of another system in, a recipe and what it lacks out."""

import importlib
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, cast

from postgrad.core.errors import UsageError
from postgrad.core.names import nearest
from postgrad.core.untrusted import shown
from postgrad.recipe.load import parse_recipe
from postgrad.recipe.translate.draft import Draft
from postgrad.recipe.translate.reader import Source, read
from postgrad.recipe.translate.writer import toml

_UNREADABLE = (ValueError, TypeError, OverflowError, LookupError, AttributeError, ZeroDivisionError)
SYSTEMS = {"openrlhf": "openrlhf", "open-instruct": "open_instruct", "trl": "trl"}


class System(Protocol):
    """What a module of this package that reads one system has."""

    def program_of(self, word: str, after: str | None) -> str | None:
        """The program that a word of a command names, by its short name."""
        ...

    def draft(self, source: Source) -> Draft:
        """The recipe of a source. Raises UsageError where its program is unknown."""
        ...


@dataclass(frozen=True, slots=True)
class Translation:
    """text: the recipe as TOML; recipe: its tables. problem: why it is no whole recipe yet."""

    text: str
    recipe: Mapping[str, Any]
    draft: Draft
    problem: str | None

    def to_json(self) -> dict[str, Any]:
        """For --json."""
        draft = self.draft
        lists = {"missing": draft.missing, "needless": draft.needless}
        return {
            "recipe": dict(self.recipe),
            "toml": self.text,
            "notes": list(draft.notes),
            "comments": {".".join(map(str, place)): text for place, text in draft.comments.items()},
            **{
                name: [{"name": one.name, "value": one.value, "why": one.why} for one in found]
                for name, found in lists.items()
            },
            "problem": self.problem,
        }


def translate(name: str, words: Sequence[str], devices: int | None = None) -> Translation:
    """The recipe of a script, a config or flags of the system called `name`.

    devices: that train, where the source does not say. Raises UsageError for what cannot be read.
    """
    system = _system(name)
    source = read(words, system.program_of)
    if devices is not None:
        source = replace(source, devices=devices)
    draft = _draft(system, source)
    draft.notes[:0] = [f"From {draft.system}, by postgrad translate.", *source.notes]
    text = toml(draft)
    recipe = tomllib.loads(text)
    return Translation(text, recipe, draft, _problem(recipe))


def _draft(system: System, source: Source) -> Draft:
    """`System.draft`. Raises UsageError that names the option whose value its program would not
    take either: the one without which the rest can be read.
    """
    try:
        return system.draft(source)
    except _UNREADABLE as error:
        names = [name for name in source.options if _reads_without(system, source, name)]
        told = f"{names[0]} = {shown(source.options[names[0]])}" if names else "several options"
        raise UsageError(f"{told}: not a value that is taken there: {error}") from error


def _reads_without(system: System, source: Source, name: str) -> bool:
    rest = {other: value for other, value in source.options.items() if other != name}
    try:
        system.draft(replace(source, options=rest))
    except (*_UNREADABLE, UsageError):
        return False
    return True


def _system(name: str) -> System:
    if name not in SYSTEMS:
        close = nearest(name, SYSTEMS)
        hint = f"did you mean {close}?" if close else f"known: {', '.join(SYSTEMS)}"
        raise UsageError(f"no system is called {name!r}: {hint}")
    module = importlib.import_module(f"postgrad.recipe.translate.{SYSTEMS[name]}")
    return cast(System, module)


def _problem(recipe: dict[str, Any]) -> str | None:
    try:
        parse_recipe(recipe, "the recipe")
    except UsageError as error:
        return str(error)
    return None
