"""Values and tables of other systems' config files, within bounds: YAML, JSON, TOML and single
words.
"""

import datetime
import os
import re
import tomllib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import yaml

from postgrad.core.errors import UsageError
from postgrad.core.files import is_file
from postgrad.core.untrusted import MOST_DEPTH, decoded, parse_json, read_bytes, reason, shown

MOST_NODES = 100_000
MOST_BYTES = 2**18  # of a script or config
MOST_DIGITS = 40
LARGEST = 2**63
CONFIGS = (".yaml", ".yml", ".json", ".toml")
PROMPTS = (".txt", ".md")  # suffixes of files with the text of a prompt
MOST_PROMPT = 2**15  # bytes of one
_TOPS = (".git", "pyproject.toml", "setup.py")  # what the top folder of a checkout has
_NUMBER = re.compile(r"[+-]?(\d[\d_]*\.?\d*|\.\d+)([eE][+-]?\d+)?")


def parse_yaml(text: str) -> Any:
    """The value of a YAML text; dates are texts. Raises ValueError where it is no YAML, is nested
    too deeply, or has aliases that hold themselves or expand a few lines to gigabytes.
    """
    try:
        node = cast(Any, yaml).compose(text, Loader=yaml.SafeLoader)
        if isinstance(node, yaml.Node):
            _size(node, {}, 0)
        return _plain(yaml.safe_load(text))
    except yaml.YAMLError as error:
        raise ValueError(f"it is not YAML: {error}") from error
    except RecursionError:
        raise ValueError(f"it is nested more than {MOST_DEPTH} deep") from None
    except (ValueError, OverflowError) as error:  # a date or a number that is none
        raise ValueError(f"a value cannot be read: {error}") from error


def _size(node: yaml.Node, sizes: dict[int, int], depth: int) -> int:
    """How many values a node has with its aliases expanded. sizes: by id, of the nodes that were
    counted before; 0 while one is being counted.
    """
    if depth > MOST_DEPTH:
        raise ValueError(f"nested more than {MOST_DEPTH} deep")
    if sizes.get(id(node)) == 0:
        raise ValueError("a name refers to a list or table that contains itself")
    if id(node) in sizes:
        return sizes[id(node)]
    sizes[id(node)] = 0
    size = 1 + sum(_size(inner, sizes, depth + 1) for inner in _inner(node))
    if size > MOST_NODES:
        raise ValueError(f"its names stand for more than {MOST_NODES} values")
    sizes[id(node)] = size
    return size


def _inner(node: yaml.Node) -> list[yaml.Node]:
    if isinstance(node, yaml.MappingNode):
        pairs = cast(list[tuple[yaml.Node, yaml.Node]], node.value)
        return [node for pair in pairs for node in pair]
    return cast(list[yaml.Node], node.value) if isinstance(node, yaml.SequenceNode) else []


def _plain(value: Any) -> Any:
    """The value with JSON's types alone: sets become lists, dates and bytes texts."""
    if isinstance(value, dict):
        table = cast(dict[Any, Any], value)
        return {key: _plain(inner) for key, inner in table.items()}
    if isinstance(value, list | tuple | set):
        return [_plain(inner) for inner in cast(list[Any], value)]
    if isinstance(value, datetime.date | datetime.time):
        return value.isoformat()
    return value.decode(errors="replace") if isinstance(value, bytes) else value


def parse_toml(text: str) -> dict[str, Any]:
    """The table of a TOML text; dates are texts. Raises ValueError where it is no TOML or is nested
    too deeply.
    """
    try:
        return _plain(tomllib.loads(text))
    except RecursionError:
        raise ValueError(f"it is nested more than {MOST_DEPTH} deep") from None


def plain(text: str) -> Any:
    """A word as the number or truth value that it is, else as text."""
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    if text in ("None", "null", "none"):
        return None
    if len(text) <= MOST_DIGITS and _NUMBER.fullmatch(text):
        return float(text) if re.search(r"[.eE]", text) else int(text)
    if text[:1] in "[{" and text:
        try:
            return parse_json(text)
        except ValueError:
            return text
    return text


def checked(name: str, value: Any) -> Any:
    """An option's value. Raises UsageError for a number that no option takes."""
    pending = [value]
    while pending:
        inner = pending.pop()
        if isinstance(inner, dict):
            pending += cast(dict[Any, Any], inner).values()
        elif isinstance(inner, list):
            pending += cast(list[Any], inner)
        elif isinstance(inner, int | float) and not abs(inner) < LARGEST:
            raise UsageError(f"{name} = {shown(inner)}: that is no number an option takes")
    return value


def text_of(path: Path, most: int = MOST_BYTES) -> str:
    """A file's text. Raises UsageError where it cannot be read or has more than `most` bytes."""
    try:
        return decoded(read_bytes(path, most, pipes=True))
    except OSError as error:
        raise UsageError(f"cannot read {path}: {reason(error)}") from error
    except ValueError as error:
        raise UsageError(f"cannot read {path}: {error}") from error


def in_checkout(name: str, folder: Path, suffixes: Sequence[str]) -> Path | None:
    """The file that a source in `folder` names; None where there is none.

    Systems name it from the top of their checkout, where their commands run: it is looked for in
    `folder` and those above it, up to the first with a mark of a checkout's top; without a mark in
    `folder` alone. Whoever wrote the source must not have other files of this machine read: a name
    that leads out of these folders, by "..", a link or from the root, is not followed, nor one of
    another suffix.
    """
    if Path(name).suffix not in suffixes or Path(name).is_absolute():
        return None
    folder = folder.resolve()
    above = [folder, *folder.parents]
    marked = [  # Path.exists raises in folders that may not be read
        any(os.path.exists(parent / mark) for mark in _TOPS)  # noqa: PTH110
        for parent in above
    ]
    top = marked.index(True) if True in marked else 0
    for parent in above[: top + 1]:
        path = parent / name
        if is_file(path) and path.resolve().is_relative_to(above[top]):
            return path
    return None


def prompt_text(name: str, folder: Path) -> str | None:
    """The text of a prompt's file in the checkout of a source; None where there is none, or it is
    no text or long.
    """
    path = in_checkout(name, folder, PROMPTS)
    try:
        return None if path is None else decoded(read_bytes(path, MOST_PROMPT))
    except (OSError, ValueError):  # listed as missing
        return None


_READERS: dict[str, Callable[[str], Any]] = {".json": parse_json, ".toml": parse_toml}


def config_table(path: Path) -> dict[str, Any]:
    """A YAML, JSON or TOML file's table; numbers that YAML takes for text (5e-6) are numbers."""
    text = text_of(path)
    try:
        parsed = _READERS.get(path.suffix, parse_yaml)(text)
    except ValueError as error:
        raise UsageError(f"cannot read {path}: {error}") from error
    if not isinstance(parsed, dict):
        raise UsageError(f"{path}: a table of settings is expected, name: value")
    table = cast(dict[Any, Any], parsed)
    options = {
        str(key).replace("-", "_"): plain(value) if isinstance(value, str) else value
        for key, value in table.items()
    }
    return {name: checked(f"{path}: {name}", value) for name, value in options.items()}
