"""What messages name is there: keys of recipes and the values that they advise, commands, pages,
extras. A message is a text of the source with four words or more that is no docstring.
"""

import ast
import re
import tomllib
from collections.abc import Iterator
from functools import cache
from typing import Any, Literal, get_args, get_origin

import pytest
from docs.tools.fields import table_of

from helpers.pages import ROOT
from postgrad.algorithms.registry import ALGORITHMS, algorithm_class
from postgrad.core.settings import Settings
from postgrad.core.text import resolve
from postgrad.recipe.recipe import JOBS
from postgrad.rewards.registry import VERIFIERS
from postgrad.rollout.environments.base import ENVIRONMENTS

SOURCE = ROOT / "src" / "postgrad"
HOLE = "\0"  # stands for a value that an f-string fills in
ASSIGNED = re.compile(r'(?<![\w.\0"])([a-z_]+(?:\.[a-z_]+)*) = (true|false|"[^"\0]*")')
OTHERS = {  # assignments that are no keys of a recipe
    "behind": "a field of an environment's Reply",
    "store": "a field of a request to /v1/responses",
    "method": "a key of vLLM's speculative_config",
    "select": "a key of pipeline.toml",
}


def tables_of(kind: type[Settings], place: str = "") -> Iterator[tuple[str, type[Settings]]]:
    """Every table of a recipe: its dotted name, without numbers of lists, and its settings."""
    yield place, kind
    for name, field in kind.model_fields.items():
        inner, _ = table_of(field.annotation)
        if inner is not None and name != "algorithm":
            yield from tables_of(inner, f"{place}.{name}".lstrip("."))


@cache
def keys() -> dict[str, list[Any]]:
    """The annotations of each dotted key, with those of all jobs, algorithms, verifiers and
    environments. One set of [eval] and [environment] is given by its own keys there.
    """
    places = [part for recipe in JOBS.values() for part in tables_of(recipe)]
    places += [("algorithm", algorithm_class(name)) for name in ALGORITHMS]
    for place, registry in (("rewards", VERIFIERS), ("environment", ENVIRONMENTS)):
        for name in registry:
            places += tables_of(resolve(name, registry, place), place)
    named: dict[str, list[Any]] = {"algorithm.type": [Literal[tuple(ALGORITHMS)]]}
    for place, kind in places:
        for name, field in kind.model_fields.items():
            for table in {place, re.sub(r"^(eval|environment)\.sets\b", r"\1", place)}:
                named.setdefault(f"{table}.{name}".lstrip("."), []).append(field.annotation)
    return named


def accepts(annotation: Any, value: str) -> bool:
    """Whether a key may have a value, which is true, false or a text in quotes."""
    if get_origin(annotation) is Literal:
        return value.strip('"') in get_args(annotation)
    if annotation is bool:
        return value in ("true", "false")
    if annotation in (str, Any):
        return value.startswith('"')
    return any(accepts(part, value) for part in get_args(annotation))


def texts(node: ast.AST) -> Iterator[tuple[int, str]]:
    """The line and text of each string below a node; parts of one f-string are one text."""
    if isinstance(node, ast.JoinedStr):
        parts = [part.value if isinstance(part, ast.Constant) else HOLE for part in node.values]
        yield node.lineno, "".join(map(str, parts))
        for part in node.values:
            if isinstance(part, ast.FormattedValue):
                yield from texts(part)
    elif isinstance(node, ast.Constant):
        if isinstance(node.value, str):
            yield node.lineno, node.value
    elif not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)):  # a docstring
        for child in ast.iter_child_nodes(node):
            yield from texts(child)


@cache
def messages() -> list[tuple[str, str]]:
    """Each message, with its file and line. Other systems' keys are what translate/ reads."""
    paths = [p for p in sorted(SOURCE.rglob("*.py")) if "translate" not in p.parts]
    return [
        (f"{path.relative_to(SOURCE)}:{line}", text)
        for path in paths
        for line, text in texts(ast.parse(path.read_text("utf-8")))
        if text.count(" ") > 2 and "\nimport " not in text
    ]


def test_every_key_that_a_message_names_is_one_of_a_recipe() -> None:
    tables = {key.rpartition(".")[0] for key in keys()} | keys().keys()
    sections = "|".join(sorted({key.partition(".")[0] for key in keys() if "." in key}))
    dotted = re.compile(rf"(?<![\w./\0'\"-])(?:--)?((?:{sections})(?:\.[a-z_0-9]+)+)(?![\w(/])")
    named = [
        (at, re.sub(r"\.\d+\b", "", match[1]))
        for at, text in messages()
        for match in dotted.finditer(text)
    ]
    files = (".json", ".jsonl", ".toml", ".py", ".safetensors")
    assert len(named) > 200
    assert [
        f"{at}: {key}" for at, key in named if key not in tables and not key.endswith(files)
    ] == []


def test_every_value_that_a_message_gives_a_key_is_one_that_the_key_may_have() -> None:
    wrong = list[str]()
    for at, text in messages():
        for match in ASSIGNED.finditer(text):
            ends = [key for key in keys() if f".{key}".endswith(f".{match[1]}")]
            kinds = [kind for key in ends for kind in keys()[key]]
            if match[1] not in OTHERS and not any(accepts(kind, match[2]) for kind in kinds):
                wrong.append(f"{at}: {match[0]}")
    assert wrong == []


def test_every_page_and_every_extra_that_a_message_names_is_there() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    for at, text in messages():
        for page in re.findall(r"\bdocs/[\w/-]+\.md\b", text):
            assert (ROOT / page).is_file(), (at, page)
        for extra in re.findall(r"postgrad\[(\w+)\]", text):
            assert extra in extras["optional-dependencies"], (at, extra)


@pytest.mark.parametrize("value", ['"dpo"', '"kto"'])
def test_an_algorithm_is_a_value_and_another_name_is_none(value: str) -> None:
    assert accepts(keys()["algorithm.type"][0], value)
    assert not accepts(keys()["algorithm.type"][0], '"dop"')
    assert not accepts(bool, value)
