"""A draft as TOML: sections in the order of docs/recipes.md, comments beside or above a line."""

import json
import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, cast

from postgrad.recipe.lines import KeyPath

_OFF: tuple[Any, ...] = (False, None, 0, 0.0, -1, "", "none", [], {})

WIDTH = 100
_ORDER = (
    "model", "reference", "teacher", "reward_model", "critic", "data", "eval", "rewards", "scoring",
    "environment", "algorithm", "batch", "rollout", "learner", "cluster", "checkpoint",
)  # fmt: skip
_FIRST = ("type", "path", "lr")  # in their section
_TOP = ("job", "run_dir", "seed", "steps", "total_episodes", "epochs")


@dataclass(frozen=True, slots=True)
class Missing:
    """An option of the source that is not in the recipe: it has no counterpart, or needs none."""

    name: str  # as the source has it
    value: Any
    why: str  # what follows from that, for people


@dataclass(frozen=True, slots=True)
class ImageRun:
    """That a source's model reads images: docs/models.md says what does not go with such models."""

    needed: str  # the program or the option that says so, for messages
    model: str  # the model's name; "" where the source has none
    option: str  # that names it
    in_rows: bool = True  # whether its rows have some; else they are text alone


@dataclass(slots=True)
class Draft:
    """A recipe under construction."""

    job: str  # "sft", "rl", ...
    system: str  # the other system's name, for comments
    images: ImageRun | None = None  # of a run whose model reads some
    values: dict[KeyPath, Any] = field(default_factory=dict[KeyPath, Any])  # by place in the recipe
    comments: dict[KeyPath, str] = field(default_factory=dict[KeyPath, str])  # on the values
    missing: list[Missing] = field(default_factory=list[Missing])  # without them the run differs
    needless: list[Missing] = field(default_factory=list[Missing])  # the run is the same without
    notes: list[str] = field(default_factory=list[str])  # on the recipe as a whole

    @property
    def has_images(self) -> bool:
        """Whether the rows of the run have images."""
        return self.images is not None and self.images.in_rows

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
        number = self.rewards
        self.put(f"rewards.{number}.type", type, comment)
        for key, value in settings.items():
            if (key, value) == ("weight", 1.0):
                continue
            self.put(f"rewards.{number}.{key}", value)

    @property
    def rewards(self) -> int:
        """How many entries [[rewards]] has."""
        return len({place[1] for place in self.values if place[0] == "rewards"})

    def miss(self, name: str, value: Any, why: str) -> None:
        """Lists an option without counterpart as missing, unless its value turns it off."""
        if not any(value is off or (value == off and type(value) is type(off)) for off in _OFF):
            self.miss_always(name, value, why)

    def miss_always(self, name: str, value: Any, why: str) -> None:
        """Lists an option as missing, whatever its value: one that no table has, or that loses
        something where it is off too.
        """
        self.missing.append(Missing(name, value, why))

    def skip(self, name: str, value: Any, why: str) -> None:
        """Lists an option that the recipe does not need."""
        self.needless.append(Missing(name, value, why))


def place_of(key: str) -> KeyPath:
    """("rewards", 0, "type") of "rewards.0.type"."""
    return tuple(int(part) if re.fullmatch(r"\d+", part) else part for part in key.split("."))


def toml(draft: Draft) -> str:
    """The recipe, and what has no counterpart as comments at its end."""
    lines = [*_notes(draft.notes), *_top(draft)]
    for table in sorted(_tables(draft), key=_rank):
        header = ".".join(str(part) for part in table if not isinstance(part, int))
        lines += ["", f"[[{header}]]" if isinstance(table[-1], int) else f"[{header}]"]
        keys = [place for place in draft.values if place[:-1] == table]
        for place in sorted(keys, key=lambda place: place[-1] not in _FIRST):
            lines += _line(draft, place)
    title = f"No counterpart here: settings of {draft.system} that this run ignores."
    lines += _comment_list(title, draft.missing)
    lines += _grouped("Not needed: a run here is the same without them.", draft.needless)
    return "\n".join(lines) + "\n"


def toml_value(value: Any) -> str:
    """A value in TOML's syntax."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int) and abs(value) >= 10_000:
        return f"{value:_}"
    if value is None:  # a word among others in a list: TOML has no such value
        return '"None"'
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(toml_value, cast(list[Any], value)))}]"
    if isinstance(value, dict):
        items = cast(dict[str, Any], value).items()
        return f"{{ {', '.join(f'{_key(key)} = {toml_value(entry)}' for key, entry in items)} }}"
    return repr(value).replace("e-0", "e-")


def _key(name: str) -> str:
    bare = name.isascii() and name.replace("_", "").replace("-", "").isalnum()
    return name if bare else json.dumps(name)


def _top(draft: Draft) -> Iterator[str]:
    yield f'job = "{draft.job}"'
    for name in _TOP[1:]:
        if (name,) in draft.values:
            yield from _line(draft, (name,))


def _tables(draft: Draft) -> set[KeyPath]:
    return {place[:-1] for place in draft.values if len(place) > 1}


def _rank(table: KeyPath) -> tuple[int | str, ...]:
    """A sort key: sections in the order of docs/recipes.md, a role's tables after it, list entries
    in order.
    """
    parts = (f"{part:06}" if isinstance(part, int) else part for part in table[1:])
    return _ORDER.index(str(table[0])), *parts


def _line(draft: Draft, place: KeyPath) -> Iterator[str]:
    line = f"{_key(str(place[-1]))} = {toml_value(draft.values[place])}"
    comment = draft.comments.get(place, "")
    beside = f"{line:<34} # {comment}"
    if not comment:
        yield line
    elif len(beside) <= WIDTH:
        yield beside
    else:
        yield from _notes([comment])
        yield line


def _notes(notes: list[str]) -> Iterator[str]:
    for note in notes:
        yield from _wrapped("# ", note)


def _comment_list(title: str, entries: list[Missing]) -> Iterator[str]:
    if not entries:
        return
    yield ""
    yield f"# {title}"
    for option in entries:
        value = "" if option.value is True else f" {_short(option.value)}"
        yield from _wrapped("#   ", f"{option.name}{value}: {option.why}")


def _grouped(title: str, entries: list[Missing]) -> Iterator[str]:
    """One paragraph for each reason, with the names that share it."""
    if entries:
        yield ""
        yield f"# {title}"
    for why in dict.fromkeys(option.why for option in entries):
        names = ", ".join(option.name for option in entries if option.why == why)
        yield from _wrapped("#   ", f"{why}: {names}")


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, default=str, ensure_ascii=False)
    text = " ".join(text.split())
    return text if len(text) <= 60 else text[:57] + "..."


def _wrapped(start: str, text: str) -> list[str]:
    after = start + "  " if len(start) > 2 else start
    visible = "".join(
        letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in text
    )
    return textwrap.wrap(
        visible, WIDTH, initial_indent=start, subsequent_indent=after,
        break_long_words=False, break_on_hyphens=False,
    )  # fmt: skip
