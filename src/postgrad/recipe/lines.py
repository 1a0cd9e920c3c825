"""Which line of a TOML file holds a key: validation errors name keys, people look for lines."""

import tomllib
from collections.abc import Iterator
from typing import Any, cast

MOST_LINES = 200
# Of a key or table: ("rewards", 0, "type") is `type` in the first [[rewards]].
KeyPath = tuple[str | int, ...]
RecipeProblem = tuple[KeyPath, str]  # where a recipe is wrong, and what is wrong there


def key_lines(text: str) -> dict[KeyPath, int]:
    """The line (from 1) of every key and table of a valid TOML text, list entries by number.

    A statement is the shortest run of lines that tomllib parses, so strings and arrays over several
    lines are no special case. Every further line parses the statement again, which is quadratic:
    after a statement of more than MOST_LINES lines no key gets a line.
    """
    lines: dict[KeyPath, int] = {}
    counts: dict[KeyPath, int] = {}  # tables of each [[array]] so far
    table: KeyPath = ()
    for number, statement in _statements(text):
        parsed = tomllib.loads(statement)
        header = statement.lstrip().startswith("[")
        if header:
            table = _table(parsed, counts, statement.lstrip().startswith("[["))
            lines.setdefault(table, number)
        else:
            for place in _places(parsed):
                lines.setdefault((*table, *place), number)
    return lines


def line_of(lines: dict[KeyPath, int], place: KeyPath) -> int | None:
    """The line of the place, or of the nearest table around it; None where there is none. A table
    without a line of its own begins with what is in it, as [[rewards]] with the first of them.
    """
    for end in range(len(place), 0, -1):
        inside = [line for key, line in lines.items() if key[:end] == place[:end]]
        if inside:
            return lines.get(place[:end], min(inside))
    return None


def _statements(text: str) -> Iterator[tuple[int, str]]:
    """(number of the first line, text) of each statement."""
    begun, start = "", 1
    for number, line in enumerate(text.split("\n"), 1):  # splitlines also ends them at U+2028
        if not begun:
            start = number
        begun += f"{line}\n"
        if number - start >= MOST_LINES:
            return
        try:
            parsed = tomllib.loads(begun)
        except tomllib.TOMLDecodeError:
            continue  # the statement goes on
        if parsed:
            yield start, begun
        begun = ""


def _table(parsed: dict[str, Any], counts: dict[KeyPath, int], is_array: bool) -> KeyPath:
    """The place of a header's table; each array on the way adds the number of its newest entry."""
    names: list[str] = []
    node: Any = parsed
    while isinstance(node, dict) and node:
        name, node = next(iter(cast(dict[str, Any], node).items()))
        names.append(name)
    place: KeyPath = ()
    for depth, name in enumerate(names, 1):
        place = (*place, name)
        if is_array and depth == len(names):
            counts[place] = counts.get(place, 0) + 1
        if place in counts:
            place = (*place, counts[place] - 1)
    return place


def _places(value: Any) -> Iterator[KeyPath]:
    """The places of all keys and list entries within a value, outer ones first."""
    entries: Iterator[tuple[str | int, Any]] = iter(())
    if isinstance(value, dict):
        entries = iter(cast(dict[str, Any], value).items())
    elif isinstance(value, list):
        entries = enumerate(cast(list[Any], value))
    for key, inner in entries:
        yield (key,)
        yield from ((key, *place) for place in _places(inner))
