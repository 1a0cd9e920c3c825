"""Configs of nested tables as options with dotted names ("trainer.optim.lr"), OmegaConf's
references between them, and Hydra's overrides of them.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

from postgrad.core.errors import UsageError
from postgrad.translate.files import checked, parse_yaml, plain

_OVERRIDE = re.compile(r"(\+{0,2}|~)([\w.@-]+)(?:=(.*))?", re.S)
_INNER = re.compile(r"\$\{([^${}]*)\}")  # a reference without another one inside
_KEPT, _END = "\ue003", "\ue004"  # around one that has no value here
_MOST = 50  # references within references

_COMPUTED: dict[str, Callable[[float, float], float]] = {
    "mul": lambda a, b: a * b,
    "add": lambda a, b: a + b,
    "div": lambda a, b: a / b,
    "max": max,
}


def flattened(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """The values of a table by dotted names; an entry of a list of tables has its number in it. An
    empty table is a value, which turns its section on.
    """
    options: dict[str, Any] = {}
    for key, value in table.items():
        name = f"{prefix}{key}"
        if isinstance(value, list) and value and all(isinstance(row, dict) for row in value):
            rows = cast(list[dict[str, Any]], value)
            options |= flattened({str(n): row for n, row in enumerate(rows)}, f"{name}.")
        elif isinstance(value, dict) and value:
            options |= flattened(cast(dict[str, Any], value), f"{name}.")
        else:
            options[name] = value
    return options


def nested(options: Mapping[str, Any]) -> dict[str, Any]:
    """The tables of options with dotted names: the reverse of `flattened`, but for lists."""
    table: dict[str, Any] = {}
    for name, value in options.items():
        *places, key = name.split(".")
        inner = table
        for place in places:
            inner = inner.setdefault(place, {})
        inner[key] = value
    return table


def overlaid(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Options of which those of `above` win: a value replaces the table of its name, and a table's
    entry the value that stood for the table.
    """
    parents = {name.rsplit(".", n)[0] for name in above for n in range(1, name.count(".") + 1)}

    def replaced(name: str) -> bool:
        tables = [name.rsplit(".", n)[0] for n in range(1, name.count(".") + 1)]
        return name in parents or any(table in above for table in tables)

    return {**{name: value for name, value in below.items() if not replaced(name)}, **above}


def resolved(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options with `${name}`, `${.beside}` and `${mul:a,b}` (add, div, max) replaced by their
    values. A reference to what is not among the options stays as it is; of `${oc.env:NAME,default}`
    the default is taken, and of `${oc.select:NAME,default}` where no option is called so. Raises
    UsageError for one that refers to itself.
    """
    return {name: _resolved(value, name, options, _MOST) for name, value in options.items()}


def _resolved(value: Any, name: str, options: Mapping[str, Any], rounds: int) -> Any:
    if isinstance(value, list):
        return [_resolved(inner, name, options, rounds) for inner in cast(list[Any], value)]
    if not isinstance(value, str):
        return value
    if rounds == 0:
        raise UsageError(f"{name}: its value refers to itself, or through too many others")
    text = value
    while (match := _INNER.search(text)) is not None:
        has_value, inner = _referred(match[1], name, options, rounds - 1)
        is_all = match.span() == (0, len(text))
        if has_value and is_all and not isinstance(inner, str):
            return inner
        put = str(inner) if has_value else f"{_KEPT}{match[1]}{_END}"
        text = text[: match.start()] + put + text[match.end() :]
    return text.replace(_KEPT, "${").replace(_END, "}")


def _referred(
    expression: str, name: str, options: Mapping[str, Any], rounds: int
) -> tuple[bool, Any]:
    """(whether there is a value, the value) of what stands in `${...}`."""
    function, colon, words = expression.partition(":")
    if not colon:
        place = f"{name.rpartition('.')[0]}{function}" if function.startswith(".") else function
        if place not in options:
            return False, None
        return True, _resolved(options[place], place, options, rounds)
    parts = [plain(word.strip()) for word in words.split(",")]
    if function == "oc.env":
        return len(parts) > 1, parts[-1]
    if function == "oc.select" and words.partition(",")[0].strip() in options:
        place = words.partition(",")[0].strip()
        return True, _resolved(options[place], place, options, rounds)
    if function == "oc.select":
        return len(parts) > 1, parts[-1]
    if function not in _COMPUTED or not all(isinstance(part, int | float) for part in parts):
        return False, None
    if len(parts) != 2 or (function == "div" and parts[1] == 0):
        return False, None
    return True, _COMPUTED[function](parts[0], parts[1])


def overrides(words: Sequence[str]) -> dict[str, Any]:
    """Hydra's overrides by name, `key=value` with `+` or `++` before it, and flags such as
    `--config FILE`; `~key` takes an option away.
    """
    options: dict[str, Any] = {}
    rest = iter(words)
    for word in rest:
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            options[name] = value if equals else next(rest, "")
        elif (match := _OVERRIDE.fullmatch(word)) and (match[3] is not None or match[1] == "~"):
            value = None if match[1] == "~" else _value(match[2], match[3])
            override = {match[2]: value}
            override = flattened(override) if isinstance(value, dict | list) else override
            options = overlaid(options, override)
    return options


def _value(name: str, text: str) -> Any:
    """The value of an override: a number, a switch, a list or a table as YAML has them, or text."""
    try:
        value = parse_yaml(text) if text[:1] in ("[", "{", "'", '"') and text else plain(text)
    except ValueError:
        return text
    return checked(name, value)
