"""Reference pages made from the code whenever the documentation is built: they cannot be stale.

mkdocs calls `on_files`; `python -m docs.tools.reference FOLDER` writes the same pages to read.
"""

import argparse
import sys
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "src")]  # mkdocs imports a hook by its path alone

from docs.tools.fields import Key, keys, prose, tables  # noqa: E402

from postgrad.algorithms.registry import ALGORITHMS, algorithm_class  # noqa: E402
from postgrad.cli.main import all_commands  # noqa: E402
from postgrad.core.settings import Settings  # noqa: E402
from postgrad.core.text import resolve  # noqa: E402
from postgrad.recipe.recipe import JOBS  # noqa: E402
from postgrad.rewards.registry import VERIFIERS  # noqa: E402
from postgrad.rollout.environments.base import ENVIRONMENTS  # noqa: E402

PAGES_OF = {"bradley_terry": "reward-model"}  # algorithms whose page has another name
RECIPE_HEAD = """# Every key of a recipe

Generated from the code. [Recipes](../recipes.md) explains the sections; `postgrad config
RECIPE.toml` prints a recipe with every default.

An empty default means that nothing is set, or that the key is required. *Jobs* lists the jobs that
read a key; empty means all jobs.
"""
COMMANDS_HEAD = """# Every command

Generated from the parsers: `postgrad COMMAND -h` prints the same. Exit codes: 0 success; 1 the run
failed; 2 the command, recipe or data is wrong. Every command also accepts `--json`, which prints
exactly one JSON object on standard output, and `--debug`, which prints tracebacks.
"""


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """mkdocs' hook: adds the pages to those that were read."""
    for path, text in pages().items():
        files.append(File.generated(config, path, content=text))
    return files


def pages() -> dict[str, str]:
    """Path below docs/ -> Markdown."""
    return {"reference/recipe.md": recipe_page(), "reference/commands.md": commands_page()}


@cache
def recipe_page() -> str:
    """Every table of a recipe with its keys, then those of algorithms, verifiers, environments."""
    places: dict[str, dict[str, type[Settings]]] = {}
    for job, recipe in JOBS.items():
        _collect(recipe, "", job, places)
    parts = [RECIPE_HEAD]
    described: dict[frozenset[type[Settings]], str] = {}
    repeated: set[str] = set()  # tables with the keys of another one, and all that is in them
    for place, kinds in places.items():
        place_described = described.setdefault(frozenset(kinds.values()), place)
        above = place.rpartition(".")[0]
        if above not in repeated:
            parts.append(
                _section(place, kinds, None if place_described == place else place_described)
            )
        if place_described != place:
            repeated.add(place)
    registries = (
        ("[algorithm]", {name: algorithm_class(name) for name in ALGORITHMS}, _algorithm_link),
        ("[[rewards]]", _resolved(VERIFIERS, "verifier"), _verifier_link),
        ("[environment]", _resolved(ENVIRONMENTS, "environment"), _environment_link),
    )
    for place, kinds, link in registries:
        for name, kind in kinds.items():
            rows = [*_header(False), *_rows(keys(kind))]
            parts.append(f'## {place} type = "{name}"\n\n{link(name)}\n\n' + "\n".join(rows))
    return "\n\n".join(parts) + "\n"


def _resolved(registry: dict[str, str], registry_name: str) -> dict[str, type[Settings]]:
    return {name: resolve(name, registry, registry_name) for name in registry}


def _algorithm_link(name: str) -> str:
    return f"See [its page](../algorithms/{PAGES_OF.get(name, name)}.md)."


def _verifier_link(_name: str) -> str:
    return "Besides the keys of every reward, above. See [rewards](../rewards.md)."


def _environment_link(_name: str) -> str:
    return "Besides the keys of every environment, above. See [environments](../environments.md)."


def _collect(
    kind: type[Settings], place: str, job: str, places: dict[str, dict[str, type[Settings]]]
) -> None:
    places.setdefault(place, {})[job] = kind
    for name, inner, several in tables(kind):
        if name == "algorithm":  # its keys follow its type: see below
            continue
        below = f"{place}.{name}".lstrip(".")
        _collect(inner, f"{below}[]" if several else below, job, places)


def _section(place: str, kinds: dict[str, type[Settings]], same_as: str | None) -> str:
    several = place.endswith("[]")
    name = place.replace("[]", "")
    title = f"[[{name}]]" if several else f"[{name}]" if name else "At the top"
    unlike = list(dict.fromkeys(kinds.values()))
    only = "" if len(kinds) == len(JOBS) else f"Of {_jobs(list(kinds))}.\n\n"
    if same_as is not None:
        like = same_as.replace("[]", "")
        return f"## {title}\n\n{only}The keys of `[{like}]`."
    if not name:
        job_choices = " or ".join(f'`"{job}"`' for job in JOBS)
        rows = [*_header(False), f"| `job` | {job_choices} | | which loop runs |"]
        shared = [key for key in keys(unlike[0]) if key.name not in ("job", "algorithm")]
        return f"## {title}\n\n" + "\n".join([*rows, *_rows(shared)])
    texts = [prose(kind) for kind in unlike]
    merged = _merged(kinds)
    mixed = any(jobs for _, jobs in merged)
    rows = [*_header(mixed), *(_row(key, jobs if mixed else None) for key, jobs in merged)]
    return f"## {title}\n\n{only}" + "\n\n".join([*texts, "\n".join(rows)])


def _merged(kinds: dict[str, type[Settings]]) -> list[tuple[Key, str]]:
    """Each key once, with the jobs that have it; "" where all of them do."""
    having: dict[Key, list[str]] = {}
    for job, kind in kinds.items():
        for key in keys(kind):
            having.setdefault(key, []).append(job)
    return [(key, "" if len(jobs) == len(kinds) else _jobs(jobs)) for key, jobs in having.items()]


def _jobs(jobs: list[str]) -> str:
    return ", ".join(f"`{job}`" for job in jobs)


def _header(with_jobs: bool) -> list[str]:
    if with_jobs:
        return ["| key | what | default | jobs | meaning |", "|---|---|---|---|---|"]
    return ["| key | what | default | meaning |", "|---|---|---|---|"]


def _rows(found_keys: Iterable[Key]) -> list[str]:
    return [_row(key, None) for key in found_keys]


def _row(key: Key, jobs: str | None) -> str:
    cells = [f"`{key.name}`", key.kind, key.default, *([] if jobs is None else [jobs]), key.note]
    return f"| {' | '.join(map(_escaped, cells))} |"


def _escaped(cell: str) -> str:
    return cell.replace("|", "\\|")


def commands_page() -> str:
    """Every command of the parsers with its words and flags."""
    return (
        "\n\n".join([COMMANDS_HEAD, *(_command(*command) for command in commands().items())]) + "\n"
    )


def commands() -> dict[str, argparse.ArgumentParser]:
    """Name -> its parser, in the order of the help."""
    (subparsers,) = [
        a for a in all_commands().parser._actions if isinstance(a, argparse._SubParsersAction)
    ]  # pyright: ignore
    return dict(subparsers.choices)


def _command(name: str, parser: argparse.ArgumentParser) -> str:
    usage = " ".join(parser.format_usage().removeprefix("usage: ").split())
    usage = usage.replace(" [-h] [--json] [--debug]", "")
    if parser.get_default("takes_overrides"):
        usage += " [--section.key VALUE ...]"
    text = (parser.description or "").strip()
    rows = [
        f"| `{_named(action)}` | {_escaped(action.help or '')} | {_default(action)} |"
        for action in parser._actions  # pyright: ignore[reportPrivateUsage]
        if action.dest not in ("help", "json", "debug")
    ]
    table = "\n".join(["| flag | meaning | default |", "|---|---|---|", *rows])
    return f"## {name}\n\n{text[:1].upper()}{text[1:]}.\n\n```text\n{usage}\n```\n\n{table}"


def _named(action: argparse.Action) -> str:
    shown: Any = action.metavar or action.dest.upper()
    if action.choices is not None:
        shown = "|".join(map(str, action.choices))
    if not action.option_strings:
        return str(shown).replace("|", " or ")
    flag = ", ".join(action.option_strings)
    return flag if action.nargs == 0 else f"{flag} {str(shown).replace('|', ' or ')}"


def _default(action: argparse.Action) -> str:
    plain = action.default in (None, False) or action.default == [] or not action.option_strings
    return "" if plain else f"`{action.default}`"


def main() -> None:
    """Writes the pages to a folder."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path)
    folder: Path = parser.parse_args().folder
    for path, text in pages().items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text, "utf-8")


if __name__ == "__main__":
    main()
