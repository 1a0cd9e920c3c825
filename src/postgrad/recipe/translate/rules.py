"""Rules: how one option of another system is said in a recipe. A translator is mostly a table of
them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, cast

from postgrad.core.errors import UsageError
from postgrad.core.names import nearest
from postgrad.recipe.translate.draft import Draft
from postgrad.recipe.translate.options import Options

Rule = Callable[[Draft, str, Any, str], None]  # draft, name, value, comment of a default


def to(key: str, comment: str = "", read: Callable[[Any], Any] | None = None) -> Rule:
    """The option is `key` here; `read` turns its value into ours, None into nothing."""

    def rule(draft: Draft, name: str, value: Any, default: str) -> None:
        draft.put(key, read(value) if read else value, comment or default)

    return rule


def choice(key: str, values: Mapping[Any, Any], comment: str = "") -> Rule:
    """The option has a few values; those without one here are listed as missing."""

    def rule(draft: Draft, name: str, value: Any, default: str) -> None:
        spelling = value.lower() if isinstance(value, str) else value
        if spelling in values:
            draft.put(key, values[spelling], comment or default)
        else:
            words = ", ".join(map(str, values))
            draft.miss(name, value, f"{key} knows {words}")

    return rule


def missing(why: str) -> Rule:
    """The option has no counterpart, and the run does something else without it."""

    def rule(draft: Draft, name: str, value: Any, default: str) -> None:
        if not default:
            draft.miss(name, value, why)

    return rule


def needless(why: str) -> Rule:
    """The option has nothing to set here: the run is the same without it."""

    def rule(draft: Draft, name: str, value: Any, default: str) -> None:
        if not default:
            draft.skip(name, value, why)

    return rule


def apply(rules: Mapping[str, Rule], options: Options, draft: Draft) -> None:
    """Applies its rule to every option that is not used yet; one without a rule is listed as
    missing.
    """
    for name, value, is_stated in list(options.rest()):
        if (rule := rules.get(name)) is not None:
            try:
                rule(draft, name, value, "" if is_stated else f"{draft.system}'s default")
            except (UsageError, TypeError, ValueError):
                draft.unknown(name, value, "its value cannot be read")
        elif is_stated:
            close = nearest(name, rules)
            hint = f"; did you mean {close}?" if close else ""
            draft.unknown(name, value, f"not an option that this translator knows{hint}")


def non_negative(value: Any) -> int | None:
    """A count; None for a number below 0, which stands for "no limit" or "off" elsewhere. Raises
    UsageError for what is no number.
    """
    count = int(decimal(value))
    return count if count >= 0 else None


def decimal(value: Any) -> float:
    """The value as a float. Raises UsageError for what is no number."""
    try:
        return float(value)
    except (TypeError, ValueError) as error:
        raise UsageError(f"a number is wanted, not {value!r}") from error


def flag(value: Any) -> bool:
    """A switch's value: true without one, false for "false", "0" and "no"."""
    return value if isinstance(value, bool) else str(value).lower() not in ("false", "0", "no")


def texts(value: Any) -> list[str]:
    """A list of texts; a single value becomes a list."""
    return [*map(str, cast(list[Any], value))] if isinstance(value, list) else [str(value)]


def on(value: Any) -> bool | None:
    """True for a switch that is on; None for one that is off, which is the default here."""
    return flag(value) or None


def family(prefix: str, names: str, rule: Rule) -> dict[str, Rule]:
    """The same rule for several options: the words of `names`, each after the prefix."""
    return {f"{prefix}{name}": rule for name in names.split()}
