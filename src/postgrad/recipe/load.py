"""Reading recipes: a TOML file and dotted overrides become one frozen, checked recipe."""

import datetime
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import tomlkit
from pydantic import ValidationError

from postgrad.core.errors import UsageError
from postgrad.core.files import write_text
from postgrad.core.text import nearest
from postgrad.core.untrusted import decoded, parse_toml, path_problem, read_bytes, reason, shown
from postgrad.models.settings import OF_LOADING
from postgrad.recipe.arrangement import SHARED
from postgrad.recipe.checks import OF_TRAINING, as_json
from postgrad.recipe.lines import KeyPath, key_lines
from postgrad.recipe.messages import Origin, explain
from postgrad.recipe.overrides import Override, apply_overrides, change, parse_overrides
from postgrad.recipe.recipe import JOBS, Recipe
from postgrad.recipe.resolve import in_sets, resolve
from postgrad.recipe.shipped import shipped

LISTS = "`postgrad recipes` lists those that ship, `postgrad new DIR` writes one for your own rows"
MOST_PROBLEMS = 20  # of one file, in a message
MOST_RECIPE_BYTES = 2**20
MOST_NUMBER = 2**63  # of a whole number: TOML's have 64 bits


def load_recipe(path: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """The recipe of a TOML file with `--section.key value` overrides.

    Raises UsageError with a line for every problem: the file and line, or the flag, that is wrong.
    """
    return load_with(Path(path), parse_overrides(overrides))


def load_with(path: Path, overrides: Sequence[Override]) -> Recipe:
    """`load_recipe` with overrides that are parsed already."""
    text = read_text(path)
    return parse_recipe(read_toml(path, text), str(path), text, overrides)


def parse_recipe(
    raw: dict[str, Any], name: str = "recipe", text: str = "", overrides: Sequence[Override] = ()
) -> Recipe:
    """The recipe of raw tables. name, text: of the file they came from, for messages."""
    raw = apply_overrides(raw, overrides)
    origin = Origin(name, raw, key_lines(text), overrides)
    require_values(raw, origin)
    job = raw.get("job")
    model = JOBS.get(job) if isinstance(job, str) else None
    if model is None:
        raise UsageError(f"{origin.where(('job',))}: {_about_job(job)}")
    try:
        return model.model_validate_json(as_json(resolve(raw)), strict=True)
    except ValidationError as error:
        raise explain(error, model, origin) from error


def recipe_from_json(data: dict[str, Any], overrides: Sequence[Override] = ()) -> Recipe:
    """The recipe of what `recipe.dump()` returned, which is how run directories keep it."""
    return parse_recipe(data, "recipe.json", overrides=overrides)


def with_overrides(recipe: Recipe, overrides: Sequence[str]) -> Recipe:
    """A resolved recipe with `--section.key value` overrides, checked again.

    An override of [eval] or [data] is set in each of their sets too: a resolved set states every
    key, so that it would take nothing from its section.
    """
    data = recipe.dump()
    parsed = parse_overrides(overrides)
    stated = {override.place for override in parsed}
    spread = [
        Override(place, override.value, override.flag)
        for override in parsed
        for place in [
            *in_sets(data, override.place),
            *(other for other in _of_others(recipe, override.place) if other not in stated),
        ]
    ]
    return recipe_from_json(data, spread)


def _of_others(recipe: Recipe, place: KeyPath) -> list[KeyPath]:
    """The places of other roles of a [learner] or [model] key that they share: a resolved role
    states it, and has to stay equal.
    """
    section, key = place[0], str(place[1]) if len(place) > 1 else ""
    if section == "learner" and key in (*SHARED, "sharding", "offload"):
        return [("critic", *place)] if recipe.job == "rl" else []
    if section != "model" or key not in ("dtype", *OF_TRAINING, *OF_LOADING):
        return []
    before = getattr(recipe.model, key)
    return [
        (*role, *place[1:])
        for role, model in recipe.model_tables.items()
        if role != ("model",) and (key == "dtype" or role == ("reference", "model"))
        if getattr(model, key) == before
    ]


def require_runnable(recipe: Recipe) -> None:
    """Raises UsageError where a recipe can be planned and not trained: its engine has other
    weights, or it names the model of a pipeline's stage (`@NAME`).
    """
    rollout = recipe.rollout_settings
    if rollout is not None and rollout.type == "openai":
        raise UsageError(
            'rollout.type = "openai": a server with weights of its own can be evaluated (postgrad '
            'eval) and not trained; take "local" or "vllm"'
        )
    require_models(recipe)


def require_models(recipe: Recipe, sections: Collection[str] | None = None) -> None:
    """Raises UsageError where a recipe alone names the model or the rows of a pipeline's stage
    (`@NAME`). sections: those that are read, such as "eval"; None: all.
    """

    def read(used: tuple[str, str]) -> bool:
        return sections is None or used[0].partition(".")[0] in sections

    for key, name in filter(read, names_used(recipe)):
        raise UsageError(
            f"{key} = '@{name}' is the model of an earlier recipe of a pipeline: name the folder "
            f"with pipeline.toml, or give --{key} DIR"
        )
    for key, name in filter(read, rows_used(recipe)):
        raise UsageError(
            f"{key} = '@{name}' are rows that an earlier recipe of a pipeline generates: name the "
            f"folder with pipeline.toml, or give --{key} FILE"
        )


def names_used(recipe: Recipe) -> list[tuple[str, str]]:
    """(key, NAME) of every `@NAME`, the exported model of a pipeline's stage. The critic's comes
    last: it is the reward model's where it states none.
    """
    tables = sorted(recipe.model_tables.items(), key=lambda item: item[0][0] == "critic")
    return [
        (".".join(map(str, (*place, "path"))), name)
        for place, table in tables
        if (name := stage_named(table.path)) is not None
    ]


def rows_used(recipe: Recipe) -> list[tuple[str, str]]:
    """(key, NAME) of every `@NAME`, the rows that a pipeline's stage generates."""
    return [
        (f"{key}.path", name)
        for key, table in data_tables(recipe.dump())
        if (name := stage_named(table.get("path"))) is not None
    ]


def data_tables(dump: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The tables of a dumped recipe that name rows, each with its key."""
    for section in ("data", "eval"):
        table: dict[str, Any] = dump[section]
        yield section, table
        for number, entry in enumerate(table["sets"]):
            yield f"{section}.sets.{number}", entry


def stage_named(path: str | None) -> str | None:
    """NAME where a path is `@NAME`."""
    return path[1:] if path is not None and path.startswith("@") else None


def read_text(path: Path) -> str:
    """The text of a recipe file. Raises UsageError where it cannot be read."""
    if problem := path_problem(str(path)):
        raise UsageError(f"no recipe at {shown(str(path))}: {problem}")
    try:
        return decoded(read_bytes(path, MOST_RECIPE_BYTES, pipes=True))
    except FileNotFoundError as error:
        raise UsageError(f"no recipe at {path}{_beside(path)}") from error
    except OSError as error:
        raise UsageError(f"cannot read the recipe {path}: {reason(error)}") from error
    except ValueError as error:
        raise UsageError(f"cannot read the recipe {path}: {error}") from error


def read_toml(path: Path, text: str) -> dict[str, Any]:
    """The tables of a TOML text. Raises UsageError with the line where it is not TOML."""
    try:
        return parse_toml(text)
    except ValueError as error:
        raise UsageError(f"{path} is not TOML: {_in_words(str(error), text)}") from error


def _in_words(problem: str, text: str) -> str:
    """What tomllib says, with the text of the line that it names."""
    if "Cannot overwrite a value" in problem:
        problem = problem.replace("Cannot overwrite a value", "the key is there twice: remove one")
    lines, at = text.split("\n"), re.search(r"\(at line (\d+), column \d+\)$", problem)
    if at is None or not 1 <= int(at[1]) <= len(lines):
        return problem
    return f"{problem}: {shown(lines[int(at[1]) - 1].strip())}"


def require_values(raw: dict[str, Any], origin: Origin) -> None:
    """Raises UsageError, with a line for each, where values are of a kind that no key takes: dates,
    numbers beyond 64 bits, paths that cannot exist.
    """
    problems = [
        f"{origin.where(place)}: {'.'.join(map(str, place))} = {shown(value)}: {problem}"
        for place, value, problem in _unfit(raw, ())
    ]
    if problems:
        raise UsageError("\n".join(problems[:MOST_PROBLEMS]))


def _unfit(table: Any, place: KeyPath) -> Iterator[tuple[KeyPath, Any, str]]:
    """(place, value, why) of every value in a table or list that its key does not take. Searches
    check hundreds of recipes, so it makes nothing for a value that fits.
    """
    entries: Iterable[tuple[str | int, Any]] = enumerate(cast(list[Any], table))
    if isinstance(table, dict):
        entries = cast(dict[str, Any], table).items()
    for key, value in entries:
        if isinstance(value, (dict, list)):
            yield from _unfit(value, (*place, key))
        elif problem := _problem(value, key):
            yield (*place, key), value, problem


def _problem(value: Any, key: str | int) -> str:
    """Why no key, or not this one, takes the value; "" where nothing is wrong with it."""
    if isinstance(value, str):
        is_path = isinstance(key, str) and (key == "run_dir" or key.endswith("path"))
        if is_path and value.isspace():
            return "a path is expected, not white space alone"
        if key in ("run_dir", "ckpt_path") and value.startswith("~"):
            return "~ is no folder here: write the whole path"
        return path_problem(value) if is_path else ""
    if isinstance(value, int) and not -MOST_NUMBER <= value < MOST_NUMBER:
        return "a whole number has at most 64 bits"
    if isinstance(value, (datetime.date, datetime.time)):
        return "a date is no value for a recipe; where a text is expected, put it in quotes"
    return ""


def _about_job(job: object) -> str:
    jobs = " or ".join(f'"{name}"' for name in JOBS)
    if job is None:
        return f"job is missing: say job = {jobs} at the top"
    close = nearest(str(job), JOBS)
    hint = f"did you mean {close!r}?" if close else f"this version knows {jobs}"
    return f"job = {shown(job)}: {hint}"


def _beside(path: Path) -> str:
    """A hint where a recipe is missing: the most similar name in its folder, else among those that
    ship, else where names are listed.
    """
    names = [entry.name for entry in path.parent.iterdir()] if path.parent.is_dir() else []
    if close := nearest(path.name, names):
        return f"; did you mean {path.parent / close}?"
    close = nearest(str(path.with_suffix("")), [name for name, _ in shipped()])
    return f"; did you mean {close}?" if close else f"; {LISTS}"


def write_changed(path: Path, overrides: Sequence[str], to: Path) -> None:
    """Writes the recipe at `path` with `--section.key value` overrides to the file `to`.

    Raises UsageError where the result is no recipe, and where `to` already exists: nobody's
    recipe is written over.
    """
    if to.exists():
        raise UsageError(f"{to} already exists: choose another name for the changed recipe")
    load_recipe(path, overrides)  # raises where they make no recipe, before anything is written
    document = tomlkit.parse(read_text(path))
    change(document, parse_overrides(overrides))
    write_text(to, tomlkit.dumps(document))


def as_toml(resolved: Mapping[str, Any]) -> str:
    """The dump of a recipe as a TOML text, which `load_recipe` reads to the same recipe. Keys
    without a value are left out: TOML has no null.
    """
    return tomlkit.dumps(_stated(resolved))


def _stated(value: Any) -> Any:
    if isinstance(value, Mapping):
        table = cast(Mapping[str, Any], value)
        return {key: _stated(entry) for key, entry in table.items() if entry is not None}
    if isinstance(value, list):
        return [_stated(entry) for entry in cast(list[Any], value)]
    return value
