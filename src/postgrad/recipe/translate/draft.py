"""The recipe that a source becomes, with a comment on why a value is what it is."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from postgrad.recipe.lines import KeyPath

_OFF: tuple[Any, ...] = (False, None, 0, 0.0, -1, "", "none", [])


@dataclass(frozen=True, slots=True)
class Missing:
    """An option of the source that is not in the recipe: it has no counterpart, or needs none."""

    name: str  # as the source has it
    value: Any
    why: str  # what follows from that, for people


@dataclass(slots=True)
class Draft:
    """A recipe under construction."""

    job: str  # "sft", "rl", ...
    system: str  # the other system's name, for comments
    values: dict[KeyPath, Any] = field(default_factory=dict[KeyPath, Any])  # by place in the recipe
    comments: dict[KeyPath, str] = field(default_factory=dict[KeyPath, str])  # on the values
    missing: list[Missing] = field(default_factory=list[Missing])  # without them the run differs
    needless: list[Missing] = field(default_factory=list[Missing])  # the run is the same without
    notes: list[str] = field(default_factory=list[str])  # on the recipe as a whole

    def put(self, key: str, value: Any, comment: str = "") -> None:
        """Sets a dotted key ("learner.lr", "rewards.0.type"); None leaves it as it is."""
        if value is None:
            return
        place = place_of(key)
        self.values[place] = value
        self.comments.pop(place, None)
        if comment:
            self.comments[place] = comment

    def get(self, key: str, default: Any = None) -> Any:
        """The value of a dotted key."""
        return self.values.get(place_of(key), default)

    def drop(self, key: str) -> Any:
        """Takes a key back and returns what it was."""
        self.comments.pop(place_of(key), None)
        return self.values.pop(place_of(key), None)

    def reward(self, type: str, comment: str = "", **settings: Any) -> None:
        """Adds an entry to [[rewards]]."""
        number = len({place[1] for place in self.values if place[0] == "rewards"})
        self.put(f"rewards.{number}.type", type, comment)
        for key, value in settings.items():
            if (key, value) == ("weight", 1.0):
                continue
            self.put(f"rewards.{number}.{key}", value)

    def miss(self, name: str, value: Any, why: str) -> None:
        """Lists an option without counterpart as missing, unless its value turns it off."""
        if not any(value is off or (value == off and type(value) is type(off)) for off in _OFF):
            self.missing.append(Missing(name, value, why))

    def unknown(self, name: str, value: Any, why: str) -> None:
        """Lists an option that the tables do not have, whatever its value."""
        self.missing.append(Missing(name, value, why))

    def skip(self, name: str, value: Any, why: str) -> None:
        """Lists an option that the recipe does not need."""
        self.needless.append(Missing(name, value, why))


def place_of(key: str) -> KeyPath:
    """("rewards", 0, "type") of "rewards.0.type"."""
    return tuple(int(part) if re.fullmatch(r"\d+", part) else part for part in key.split("."))


def nested(values: Mapping[KeyPath, Any]) -> dict[str, Any]:
    """Values by place as the tables that a TOML file would give."""
    tree: dict[Any, Any] = {}
    for place, value in values.items():
        node = tree
        for part in place[:-1]:
            node = node.setdefault(part, {})
        node[place[-1]] = value
    return {str(key): _listed(value) for key, value in tree.items()}


def _listed(node: Any) -> Any:
    if not isinstance(node, dict):
        return node
    table: dict[Any, Any] = node  # pyright: ignore[reportUnknownVariableType]
    inner = {key: _listed(value) for key, value in table.items()}
    return [inner[key] for key in sorted(inner)] if table and 0 in table else inner
