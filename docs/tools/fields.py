"""What the code says of a recipe's keys: type, default, bounds, the comment beside the field."""

import ast
import inspect
import re
import textwrap
import types
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, Union, get_args, get_origin

import annotated_types as bounds
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from postgrad.core.settings import Settings

PLAIN = {str: "text", int: "whole number", float: "number", bool: "true or false"}
LONGEST = 100  # characters of a default that a table has room for
SIGNS = {
    bounds.Ge: ("ge", "≥"),
    bounds.Gt: ("gt", ">"),
    bounds.Le: ("le", "≤"),
    bounds.Lt: ("lt", "<"),
}


@dataclass(frozen=True, slots=True)
class Key:
    """One key of a table of a recipe."""

    name: str
    kind: str
    default: str
    note: str


def keys(settings: type[Settings]) -> Iterator[Key]:
    """The plain keys of one table, in the order of the code; tables within it are `tables`."""
    notes = comments(settings)
    for name, field in settings.model_fields.items():
        if not table_of(field.annotation)[0]:
            yield Key(name, kind_of(field), default_of(field), notes.get(name, ""))


def tables(settings: type[Settings]) -> Iterator[tuple[str, type[Settings], bool]]:
    """(name, settings, whether there may be several) of each table within a table."""
    for name, field in settings.model_fields.items():
        table, several = table_of(field.annotation)
        if table:
            yield name, table, several


def table_of(annotation: Any) -> tuple[type[Settings] | None, bool]:
    """The settings that a field holds, if it does, and whether it holds a list of them."""
    if isinstance(annotation, type) and issubclass(annotation, Settings):
        return annotation, False
    inner = [
        argument for argument in get_args(annotation) if argument not in (type(None), Ellipsis)
    ]
    if get_origin(annotation) in (tuple, types.UnionType, Union) and len(inner) == 1:
        return table_of(inner[0])[0], get_origin(annotation) is tuple
    return None, False


def kind_of(field: FieldInfo) -> str:
    """What may stand there, in words."""
    return " ".join([words(field.annotation), *_limits(field.metadata)])


def words(annotation: Any) -> str:
    """A type in words: whole number, "a" or "b", list of text."""
    if annotation in PLAIN:
        return PLAIN[annotation]
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin is typing.Annotated:
        return " ".join([words(inner[0]), *_limits(inner[1:])])
    if origin is Literal:
        return " or ".join(f'`"{inner_type}"`' for inner_type in inner)
    if origin in (types.UnionType, Union):
        return " or ".join(
            words(inner_type) for inner_type in inner if inner_type is not type(None)
        )
    if origin is tuple:
        members = [part for part in inner if part is not Ellipsis]
        return (
            f"list of {words(members[0])}"
            if Ellipsis in inner
            else f"{len(members)} × {words(members[0])}"
        )
    if origin is dict or annotation is dict:
        return "table"
    return "anything"


def _limits(metadata: Any) -> list[str]:
    flat: list[Any] = []
    for constraint in metadata:  # Annotated[int, Field(ge=2)] has them one level down
        flat.extend(constraint.metadata if isinstance(constraint, FieldInfo) else [constraint])
    return [
        f"{sign} {getattr(constraint, name):g}"
        for constraint in flat
        for kind, (name, sign) in SIGNS.items()
        if isinstance(constraint, kind)
    ]


def default_of(field: FieldInfo) -> str:
    """As it would be written in a recipe; "" where there is none."""
    value = field.default
    if value is PydanticUndefined:
        return "" if field.default_factory is None else written(field.default_factory())  # pyright: ignore
    return written(value)


def written(value: Any) -> str:
    """A value as TOML, in backticks; None is left out of a recipe and stands as nothing."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if isinstance(value, str):
        return f'`"{value}"`' if len(value) < LONGEST else "a text of its own"
    if isinstance(value, tuple):
        return f"`[{', '.join(written(entry).strip('`') for entry in value)}]`"
    if isinstance(value, dict):
        return "`{}`" if not value else f"`{value}`"
    return f"`{value:g}`" if isinstance(value, float) else f"`{value}`"


def comments(settings: type[Settings]) -> dict[str, str]:
    """Field -> the comment beside it, or in the lines above it, as the source has it."""
    notes: dict[str, str] = {}
    for kind in reversed(settings.__mro__):
        if issubclass(kind, Settings) and kind is not Settings:
            notes.update(_own_comments(textwrap.dedent(inspect.getsource(kind))))
    return notes


def _own_comments(source: str) -> dict[str, str]:
    (tree,) = ast.parse(source).body
    assert isinstance(tree, ast.ClassDef)
    lines = source.splitlines()
    notes: dict[str, str] = {}
    for node in tree.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            beside = [_comment(line) for line in lines[node.lineno - 1 : node.end_lineno]]
            above: list[str] = []
            at = node.lineno - 2
            while at >= 0 and lines[at].lstrip().startswith("# "):
                above.insert(0, lines[at].strip().removeprefix("# "))
                at -= 1
            notes[node.target.id] = " ".join(comment for comment in [*above, *beside] if comment)
    return notes


def _comment(line: str) -> str:
    match = re.search(r'  # (?!pyright|noqa|type:)([^"]*(?:"[^"]*"[^"]*)*)$', line)
    return match[1] if match else ""


def prose(settings: type[Settings]) -> str:
    """A class's docstring as Markdown, the names of its keys marked where it explains them."""
    text = inspect.cleandoc(settings.__doc__ or "")
    names = "|".join(sorted(settings.model_fields, key=len, reverse=True))
    return re.sub(rf"(?<![\w`.])({names})(?=: |, (?:{names}): )", r"`\1`", text)


def docstrings_of(settings: type[Settings]) -> str:
    """All that the docstrings of a class and its bases say, to look for keys in."""
    return "\n".join(
        kind.__doc__ or ""
        for kind in settings.__mro__
        if issubclass(kind, Settings) and kind is not Settings
    )
