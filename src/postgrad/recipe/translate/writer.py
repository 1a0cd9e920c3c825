"""A draft as TOML: sections in the order of docs/recipes.md, comments beside or above a line."""

import json
import textwrap
from collections.abc import Iterator
from typing import Any, cast

from postgrad.recipe.lines import KeyPath
from postgrad.recipe.translate.draft import Draft, Missing

WIDTH = 100
_ORDER = (
    "model", "reference", "reward_model", "critic", "data", "eval", "rewards", "scoring",
    "environment", "algorithm", "batch", "rollout", "learner", "cluster", "checkpoint",
)  # fmt: skip
_FIRST = ("type", "path", "lr")  # in their section
_TOP = ("job", "run_dir", "seed", "steps", "total_episodes", "epochs")


def toml(draft: Draft) -> str:
    """The recipe, and what has no counterpart as comments at its end."""
    lines = [*_notes(draft.notes), *_top(draft)]
    for table in sorted(_tables(draft), key=_rank):
        header = ".".join(str(part) for part in table if not isinstance(part, int))
        lines += ["", f"[[{header}]]" if isinstance(table[-1], int) else f"[{header}]"]
        keys = [place for place in draft.values if place[:-1] == table]
        for place in sorted(keys, key=lambda place: place[-1] not in _FIRST):
            lines += _line(draft, place)
    lines += _listed(f"No counterpart here: what {draft.system} was told and this run does not do.",
                     draft.missing)  # fmt: skip
    lines += _grouped("Need no saying here.", draft.needless)
    return "\n".join(lines) + "\n"


def toml_value(value: Any) -> str:
    """A value in TOML's syntax."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int) and abs(value) >= 10_000:
        return f"{value:_}"
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


def _listed(title: str, entries: list[Missing]) -> Iterator[str]:
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
