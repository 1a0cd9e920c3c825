"""YAML of other systems as JSON values, whatever its aliases would make of a few lines."""

import datetime
from typing import Any, cast

import yaml

from postgrad.core.untrusted import MOST_DEPTH

MOST_NODES = 100_000


def parse_yaml(text: str) -> Any:
    """The value of a YAML text; dates are texts. Raises ValueError where it is no YAML, or not one
    that a person would write: deep, a name that stands for itself, or names that stand for names
    and so on (a few lines become gigabytes).
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


def _size(node: yaml.Node, known: dict[int, int], depth: int) -> int:
    """Values of a node with all that its aliases stand for, each node counted once."""
    if depth > MOST_DEPTH:
        raise ValueError(f"nested more than {MOST_DEPTH} deep")
    if known.get(id(node)) == 0:
        raise ValueError("a name stands for a list or table that holds itself")
    if id(node) in known:
        return known[id(node)]
    known[id(node)] = 0  # under way
    size = 1 + sum(_size(one, known, depth + 1) for one in _inner(node))
    if size > MOST_NODES:
        raise ValueError(f"its names stand for more than {MOST_NODES} values")
    known[id(node)] = size
    return size


def _inner(node: yaml.Node) -> list[yaml.Node]:
    if isinstance(node, yaml.MappingNode):
        pairs = cast(list[tuple[yaml.Node, yaml.Node]], node.value)
        return [one for pair in pairs for one in pair]
    return cast(list[yaml.Node], node.value) if isinstance(node, yaml.SequenceNode) else []


def _plain(value: Any) -> Any:
    """As JSON has it."""
    if isinstance(value, dict):
        table = cast(dict[Any, Any], value)
        return {key: _plain(inner) for key, inner in table.items()}
    if isinstance(value, list | tuple | set):
        return [_plain(inner) for inner in cast(list[Any], value)]
    if isinstance(value, datetime.date | datetime.time):
        return value.isoformat()
    return value.decode(errors="replace") if isinstance(value, bytes) else value
