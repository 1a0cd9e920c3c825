"""`postgrad translate`: a source of another system in, a recipe and what it lacks out."""

import importlib
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, cast

from postgrad.core.errors import UsageError
from postgrad.core.text import nearest
from postgrad.core.untrusted import shown
from postgrad.recipe.load import parse_recipe
from postgrad.translate.draft import Draft, toml
from postgrad.translate.images import image_run, keep_towers, require_read
from postgrad.translate.reader import (
    Dialect,
    ProgramReader,
    SourceCommand,
    SourceCommands,
    read,
)

_UNREADABLE = (ValueError, TypeError, OverflowError, LookupError, AttributeError, ZeroDivisionError)
SYSTEMS = {
    "openrlhf": "openrlhf",
    "open-instruct": "open_instruct",
    "trl": "trl",
    "prime-rl": "prime_rl",
    "nemo-rl": "nemo_rl",
    "verl": "verl",
}
PROGRAM_READERS = {"trl": "trl_program"}  # the module that reads a system's Python programs


class System(Dialect, Protocol):
    """The module of one system: openrlhf.py, trl.py, prime_rl.py ..."""

    JOBS: Mapping[str, Any]  # by program, those that become recipes
    OTHERS: Mapping[str, str]  # by a pattern of other programs' names, what stands for them here

    def names_of(self, source: SourceCommand) -> Sequence[str]:
        """The options that a source states, by the names that its draft has."""
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
    stated: tuple[str, ...] = ()  # the source's options, by the names that `draft` has

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


def sources(name: str, words: Sequence[str]) -> SourceCommands:
    """The commands of a script, a config or flags of the system called `name`, in order. Raises
    UsageError for what cannot be read.
    """
    return read(words, _system(name), _programs(name))


def translate(
    name: str, words: Sequence[str], devices: int | None = None, command: int | None = None
) -> Translation:
    """The recipe of a script, a config or flags of the system called `name`.

    devices: how many train, for a source that does not say. command: which of a script's commands,
    counted from 1; the first that trains where left out. Raises UsageError for what cannot be read,
    and for a run with images of a model that is not trained on them here.
    """
    system = _system(name)
    source = read(words, system, _programs(name))
    number = _chosen(system, source, command)
    chosen = source.commands[number]
    if chosen.program and chosen.program not in system.JOBS:
        raise UsageError(f"{chosen.program}: {_instead(system, chosen.program)}")
    images = chosen.images or image_run(chosen.program, chosen.options)
    if images is not None:
        require_read(images)
        chosen = replace(chosen, images=images)
    if devices is not None:
        chosen = replace(chosen, devices=devices)
    draft = _draft(system, chosen)
    keep_towers(draft)
    draft.missing += chosen.lost
    draft.needless += chosen.needless
    draft.notes[:0] = [
        f"From {draft.system}, by postgrad translate.",
        *chosen.notes,
        *_left_out(system, source, number),
    ]
    text = toml(draft)
    recipe = tomllib.loads(text)
    beside = (option.name for option in (*chosen.lost, *chosen.needless))
    stated = tuple(dict.fromkeys([*system.names_of(chosen), *beside]))
    return Translation(text, recipe, draft, _problem(recipe), stated)


def _chosen(system: System, source: SourceCommands, command: int | None) -> int:
    """The place of the command to translate. Raises UsageError where there is no such command."""
    programs = [command.program for command in source.commands]
    if command is not None and not 1 <= command <= len(programs):
        listed = ", ".join(f"{n} {program}" for n, program in enumerate(programs, 1))
        raise UsageError(f"--command {command}: the source has {listed}")
    if command is not None:
        return command - 1
    able = (n for n, program in enumerate(programs) if not program or program in system.JOBS)
    return next(able, 0)


def _instead(system: System, program: str) -> str:
    """What stands here for a program that is no job of a recipe."""
    reasons = (why for pattern, why in system.OTHERS.items() if re.fullmatch(pattern, program))
    return next(reasons, f"not a program that this translator knows ({', '.join(system.JOBS)})")


def _left_out(system: System, source: SourceCommands, number: int) -> Iterator[str]:
    """What becomes of a script's other commands."""
    chosen = source.commands[number]
    skipped: dict[str, list[int]] = {}
    for place, command in enumerate(source.commands, 1):
        if (command.program, command.options) == (chosen.program, chosen.options):
            continue
        if command.program in system.JOBS:
            yield (
                f"Command {place} of the script, {command.program}, is a run of its own: translate "
                f"it with --command {place}."
            )
        else:
            skipped.setdefault(command.program, []).append(place)
    for program, places in skipped.items():
        which = f"Command{'s' if len(places) > 1 else ''} {', '.join(map(str, places))}"
        why = f"{program} is not in this recipe: {_instead(system, program)}"
        yield f"{which} of the script: {why}."
    if source.others:
        yield f"Other commands of the script, not in the recipe: {', '.join(source.others)}."


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


def _programs(name: str) -> ProgramReader | None:
    if name not in PROGRAM_READERS:
        return None
    return importlib.import_module(f"postgrad.translate.{PROGRAM_READERS[name]}").commands_of


def _problem(recipe: dict[str, Any]) -> str | None:
    try:
        parse_recipe(recipe, "the recipe")
    except UsageError as error:
        return str(error)
    return None
