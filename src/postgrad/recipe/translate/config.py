"""YAML of other systems as JSON values, with limits on what its aliases may expand to."""

import datetime
from typing import Any, cast

import yaml

from postgrad.core.untrusted import MOST_DEPTH

MOST_NODES = 100_000


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
        raise ValueError("a name stands for a list or table that holds itself")
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
