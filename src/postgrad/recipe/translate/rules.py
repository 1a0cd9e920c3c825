"""Rules: what one option of another system is here. A table of them is a translator's main part."""

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
        known = value.lower() if isinstance(value, str) else value
        if known in values:
            draft.put(key, values[known], comment or default)
        else:
            words = ", ".join(str(one) for one in values)
            draft.miss(name, value, f"{key} knows {words}")

    return rule


def missing(why: str) -> Rule:
    """The option has no counterpart, and the run does something else without it."""

    def rule(draft: Draft, name: str, value: Any, default: str) -> None:
        if not default:
            draft.miss(name, value, why)

    return rule


def needless(why: str) -> Rule:
    """The option needs no saying here."""

    def rule(draft: Draft, name: str, value: Any, default: str) -> None:
        if not default:
            draft.skip(name, value, why)

    return rule


def apply(rules: Mapping[str, Rule], options: Options, draft: Draft) -> None:
    """Every option that nobody has taken, by its rule; one without a rule is listed as missing."""
    for name, value, given in list(options.rest()):
        if (rule := rules.get(name)) is not None:
            try:
                rule(draft, name, value, "" if given else f"{draft.system}'s default")
            except (UsageError, TypeError, ValueError):
                draft.unknown(name, value, "its value cannot be read")
        elif given:
            close = nearest(name, rules)
            hint = f"; did you mean {close}?" if close else ""
            draft.unknown(name, value, f"not an option that this translator knows{hint}")


def whole(value: Any) -> int | None:
    """A count; None and what is below 0 stand for nothing."""
    count = int(decimal(value))
    return count if count >= 0 else None


def decimal(value: Any) -> float:
    """A number with a decimal point. Raises UsageError for what is none."""
    try:
        return float(value)
    except (TypeError, ValueError) as error:
        raise UsageError(f"a number is wanted, not {value!r}") from error


def flag(value: Any) -> bool:
    """A switch: given, or given with a truth value."""
    return value if isinstance(value, bool) else str(value).lower() not in ("false", "0", "no")


def texts(value: Any) -> list[str]:
    """One text or several."""
    return [str(one) for one in cast(list[Any], value)] if isinstance(value, list) else [str(value)]


def on(value: Any) -> bool | None:
    """A switch that is off here anyway."""
    return flag(value) or None


def family(prefix: str, names: str, rule: Rule) -> dict[str, Rule]:
    """The same rule for several names, words of `names` after a prefix."""
    return {f"{prefix}{name}": rule for name in names.split()}
