"""`postgrad translate`: a source of another system in, a recipe and what it lacks out."""

import importlib
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, cast

from postgrad.core.errors import UsageError
from postgrad.core.text import nearest
from postgrad.core.untrusted import shown
from postgrad.recipe.load import parse_recipe
from postgrad.translate.draft import Draft, toml
from postgrad.translate.reader import SourceCommand, read

_UNREADABLE = (ValueError, TypeError, OverflowError, LookupError, AttributeError, ZeroDivisionError)
SYSTEMS = {"openrlhf": "openrlhf", "open-instruct": "open_instruct", "trl": "trl"}


class System(Protocol):
    """The module of one system: openrlhf.py, trl.py, open_instruct.py."""

    def program_of(self, word: str, after: str | None) -> str | None:
        """The program that a word of a command names, by its short name."""
        ...

    def draft_recipe(self, source: SourceCommand) -> Draft:
        """The recipe of a source. Raises UsageError where its program is unknown."""
        ...


@dataclass(frozen=True, slots=True)
class Translation:
    """A recipe made from another system's source."""

    text: str  # the recipe as TOML, with comments
    recipe: Mapping[str, Any]  # the tables of that TOML
    draft: Draft  # what it was written from: values, comments, options without counterpart
    problem: str | None  # why it does not load yet, such as a key that only a person can give

    def to_json(self) -> dict[str, Any]:
        """The JSON object of `postgrad translate --json`."""
        draft = self.draft
        lists = {"missing": draft.missing, "needless": draft.needless}
        return {
            "recipe": dict(self.recipe),
            "toml": self.text,
            "notes": list(draft.notes),
            "comments": {".".join(map(str, place)): text for place, text in draft.comments.items()},
            **{
                name: [
                    {"name": option.name, "value": option.value, "why": option.why}
                    for option in listed
                ]
                for name, listed in lists.items()
            },
            "problem": self.problem,
        }


def translate(name: str, words: Sequence[str], devices: int | None = None) -> Translation:
    """The recipe of a script, a config or flags of the system called `name`.

    devices: how many train, for a source that does not say. Raises UsageError for what cannot be
    read.
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


def _draft(system: System, source: SourceCommand) -> Draft:
    """`System.draft_recipe`. Raises UsageError for a value that cannot be read, and names its
    option: the first one without which the rest can be read.
    """
    try:
        return system.draft_recipe(source)
    except _UNREADABLE as error:
        names = [name for name in source.options if _reads_without(system, source, name)]
        culprit = f"{names[0]} = {shown(source.options[names[0]])}" if names else "several options"
        raise UsageError(f"{culprit}: not a value that is taken there: {error}") from error


def _reads_without(system: System, source: SourceCommand, name: str) -> bool:
    rest = {other: value for other, value in source.options.items() if other != name}
    try:
        system.draft_recipe(replace(source, options=rest))
    except (*_UNREADABLE, UsageError):
        return False
    return True


def _system(name: str) -> System:
    if name not in SYSTEMS:
        close = nearest(name, SYSTEMS)
        hint = f"did you mean {close}?" if close else f"known: {', '.join(SYSTEMS)}"
        raise UsageError(f"no system is called {name!r}: {hint}")
    module = importlib.import_module(f"postgrad.translate.{SYSTEMS[name]}")
    return cast(System, module)


def _problem(recipe: dict[str, Any]) -> str | None:
    try:
        parse_recipe(recipe, "the recipe")
    except UsageError as error:
        return str(error)
    return None
