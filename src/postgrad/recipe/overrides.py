"""Dotted overrides: `--section.key value` on the command line wins over the file."""

import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

from postgrad.core.errors import UsageError
from postgrad.core.untrusted import MOST_DEPTH, is_deep, parse_toml
from postgrad.recipe.lines import KeyPath

MOST_KEY = 1000  # characters of a dotted key
MOST_SHOWN = 200  # of what was typed, in a message

# Ways to state one quantity: an override of one takes the place of the others.
ALTERNATIVES: tuple[tuple[KeyPath, ...], ...] = (
    (("steps",), ("total_episodes",), ("epochs",)),
    (
        ("batch", "train_batch_size"),
        ("batch", "num_mini_batches"),
        ("batch", "local_mini_batch_size"),
    ),
    (("batch", "micro_train_batch_size"), ("batch", "micro_train_tokens")),
    (("model", "path"), ("model", "init")),
)


@dataclass(frozen=True, slots=True)
class Override:
    """One `--key value` of the command line."""

    place: KeyPath  # ("rewards", 0, "weight") of --rewards.0.weight
    value: Any  # as TOML reads it
    flag: str  # as it was typed, shortened, for messages


def parse_overrides(arguments: Sequence[str]) -> list[Override]:
    """From ["--learner.lr", "1e-4", "--steps=10", ...]; numbers in a key count list entries.

    A value is read as TOML (1e-4, true, [1, 2], "text"); what is not TOML is a string. Raises
    UsageError for a word that is no flag and a flag without value.
    """
    overrides: list[Override] = []
    words = list(arguments)
    while words:
        word = words.pop(0)
        if not word.startswith("--") or word == "--":
            raise UsageError(f"{word!r}: a flag such as --section.key is expected here")
        name, equals, text = word[2:].partition("=")
        if not equals:
            if not words or (words[0].startswith("--") and len(words[0]) > 2):
                raise UsageError(f"--{name} needs a value: --{name} VALUE")
            text = words.pop(0)
        parts = name.split(".")
        if not all(parts) or len(parts) > MOST_DEPTH or len(name) > MOST_KEY:
            raise UsageError(f"--{_short(name)}: a dotted key such as --learner.lr is expected")
        place = tuple(int(part) if part.isdecimal() else part for part in parts)
        value = _short(text) if text.strip() else repr(text)  # an empty one could not be seen
        flag = f"--{name} {value}"
        overrides.append(Override(place, _value(text, flag), flag))
    return overrides


def last_of_each(arguments: Sequence[str]) -> list[str]:
    """The words without flags that a later one of the same key replaces."""
    words, values = list(arguments), dict[str, str]()
    while words:
        name, equals, text = words.pop(0).partition("=")
        value = text if equals else words.pop(0)
        values.pop(name, None)  # the last one's place counts too: a table, then a key of it
        values[name] = value
    return [word for flag in values.items() for word in flag]


def apply_overrides(raw: dict[str, Any], overrides: Sequence[Override]) -> dict[str, Any]:
    """A new raw recipe with the overrides set; the last of two for one key wins."""
    result = _copy(raw)
    change(result, overrides)
    return result


def change(raw: Any, overrides: Sequence[Override]) -> None:
    """`apply_overrides` in place, on tables that behave as dicts and lists do."""
    for override in overrides:
        for alternatives in ALTERNATIVES:
            if override.place in alternatives:
                for place in alternatives:
                    _remove(raw, place)
    for override in overrides:
        _set(raw, override)


def _short(text: str) -> str:
    """What was typed, cut to what a message has room for."""
    return text if len(text) <= MOST_SHOWN else f"{text[:MOST_SHOWN]}..."


def _value(text: str, flag: str) -> Any:
    try:
        parsed = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        return text
    except (RecursionError, ValueError):  # TOML, but too deep or too long: parse_toml says why
        parsed = _bounded(text, flag)
    if is_deep(parsed):
        parsed = _bounded(text, flag)
    return parsed["value"] if list(parsed) == ["value"] else text


def _bounded(text: str, flag: str) -> dict[str, Any]:
    """The value read with the limits of a file. Raises UsageError that names the flag."""
    try:
        return parse_toml(f"value = {text}")
    except ValueError as error:
        raise UsageError(f"{flag}: {error}") from error


def _copy(value: Any) -> Any:
    """A table or list with new tables and lists all the way down."""
    if isinstance(value, dict):
        items = cast(dict[str, Any], value).items()
        return {
            key: _copy(inner) if isinstance(inner, (dict, list)) else inner for key, inner in items
        }
    entries = cast(list[Any], value)
    return [_copy(inner) if isinstance(inner, (dict, list)) else inner for inner in entries]


def _remove(raw: dict[str, Any], place: KeyPath) -> None:
    node: Any = raw
    for part in place[:-1]:
        node = cast(dict[Any, Any], node).get(part) if isinstance(node, dict) else None
    if isinstance(node, dict):
        cast(dict[Any, Any], node).pop(place[-1], None)


def _begun(part: str | int) -> Any:
    """What a key that was left out has before `part` of it is set: a table, or a list whose first
    entry is there to be set.
    """
    if isinstance(part, str):
        return {}
    return [{}] if part == 0 else []


def _set(raw: dict[str, Any], override: Override) -> None:
    node: Any = raw
    for depth, part in enumerate(override.place):
        last = depth == len(override.place) - 1
        if isinstance(node, list):
            entries = cast(list[Any], node)
            if not isinstance(part, int) or part >= len(entries):
                key = ".".join(str(p) for p in override.place[:depth])
                raise UsageError(
                    f"{override.flag}: {key} is a list of {len(entries)}; "
                    f"--{key}.0 and so on name its entries"
                )
            if last:
                entries[part] = override.value
            else:
                node = entries[part]
        elif isinstance(node, dict):
            table = cast(dict[Any, Any], node)
            key = str(part)
            if last:
                table[key] = override.value
            else:
                if table.get(key) is None:  # left out: null in a recipe's dump
                    table[key] = _begun(override.place[depth + 1])
                node = table[key]
        else:
            key = ".".join(str(p) for p in override.place[:depth])
            raise UsageError(f"{override.flag}: {key} is a value, not a table with keys of its own")
