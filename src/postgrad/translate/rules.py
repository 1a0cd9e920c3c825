"""Rules: how one option of another system is said in a recipe. A translator is mostly a table of
them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, cast

from postgrad.core.errors import UsageError
from postgrad.core.text import nearest
from postgrad.translate.draft import Draft

ON, OFF = ("True", "true", "1"), ("False", "false", "0")  # values of a switch, for missing_but
Rule = Callable[[Draft, str, Any, str], None]  # draft, name, value, comment of a default


class Options:
    """Options by name: those that the source states, and the defaults of its system."""

    def __init__(self, stated: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
        self.stated = dict(stated)
        self.defaults = dict(defaults)
        self._used: set[str] = set()

    def states(self, name: str) -> bool:
        """Whether the source states the option itself."""
        return self.stated.get(name) is not None

    def take(self, name: str, default: Any = None) -> Any:
        """The option's value: as stated, else the system's default, else `default`. It counts as
        used from then on.
        """
        self._used.add(name)
        if (value := self.stated.get(name)) is not None:
            return value
        value = self.defaults.get(name)
        return default if value is None else value

    def number(self, name: str, default: int = 1) -> int:
        """`take` as a whole number. Raises UsageError for anything else."""
        value = self.take(name, default)
        try:
            return int(float(value))
        except (TypeError, ValueError) as error:
            raise UsageError(f"{name}: a number is expected, not {value!r}") from error

    def texts(self, name: str) -> list[str]:
        """`take` as a list of words; a text is split at its commas."""
        value = self.take(name)
        if value is None:
            return []
        words = cast(list[Any], value) if isinstance(value, list) else str(value).split(",")
        return [text for word in words if (text := str(word).strip(" ,"))]

    def numbers(self, name: str) -> list[float]:
        """`take` as a list of numbers. Raises UsageError for a text that is none."""
        try:
            return [float(text) for text in self.texts(name)]
        except ValueError as error:
            raise UsageError(f"{name}: numbers are expected, not {self.take(name)!r}") from error

    def pair(self, name: str) -> tuple[float, float] | None:
        """`take` as two numbers, the lower first; None where the option has no value. Raises
        UsageError for anything else.
        """
        numbers = self.numbers(name)
        if numbers and (len(numbers) != 2 or numbers[0] > numbers[1]):
            raise UsageError(
                f"{name}: two numbers are expected, the lower first, not {self.take(name)!r}"
            )
        return (numbers[0], numbers[1]) if numbers else None

    def table(self, name: str) -> dict[str, Any]:
        """`take` as a table; an empty one for anything else."""
        value = self.take(name)
        return cast(dict[str, Any], value) if isinstance(value, dict) else {}

    def tables(self, name: str) -> list[dict[str, Any]]:
        """`take` as a list of tables; entries that are none are left out."""
        value = self.take(name)
        entries = cast(list[Any], value) if isinstance(value, list) else []
        return [cast(dict[str, Any], entry) for entry in entries if isinstance(entry, dict)]

    def rest(self) -> Iterator[tuple[str, Any, bool]]:
        """(name, value, whether the source states it) of the options that are not used yet, in the
        source's order, then the defaults'.
        """
        for name, value in {**self.stated, **self.defaults, **self.stated}.items():
            if name not in self._used and value is not None:
                yield name, value, name in self.stated


def to(key: str, comment: str = "", read: Callable[[Any], Any] | None = None) -> Rule:
    """The option is `key` here; `read` turns its value into ours, None into nothing."""

    def rule(draft: Draft, name: str, value: Any, default: str) -> None:
        draft.put(key, read(value) if read else value, comment or default)

    return rule


def choice(key: str, values: Mapping[Any, Any]) -> Rule:
    """The option has a few values; those without one here are listed as missing."""

    def rule(draft: Draft, name: str, value: Any, default: str) -> None:
        spelling = value.lower() if isinstance(value, str) else value
        if spelling in values:
            draft.put(key, values[spelling], default)
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


def missing_but(same: tuple[str, ...], why: str) -> Rule:
    """As `missing`, but for values that mean the same as here."""

    def rule(draft: Draft, name: str, value: Any, default: str) -> None:
        if str(value) in same:
            draft.skip(name, value, "as here")
        elif not default:
            draft.miss_always(name, value, why)  # False too: here it is on

    return rule


def missing_above_1(why: str) -> Rule:
    """As `missing`, for a number of parts: one part is none."""

    def rule(draft: Draft, name: str, value: Any, default: str) -> None:
        if not default and decimal(value) > 1:
            draft.miss(name, value, why)

    return rule


def needless(why: str) -> Rule:
    """The option has nothing to set here: without it the run is the same, within a tenth in time
    and memory.
    """

    def rule(draft: Draft, name: str, value: Any, default: str) -> None:
        if not default:
            draft.skip(name, value, why)

    return rule


def apply(rules: Mapping[str, Rule], options: Options, draft: Draft) -> None:
    """Applies its rule to every option that is not used yet; one without a rule is listed as
    missing. A rule for "a.b.*" is for all options of that table that have none of their own.
    """
    for name, value, is_stated in list(options.rest()):
        if (rule := _rule_of(rules, name)) is not None:
            try:
                rule(draft, name, value, "" if is_stated else f"{draft.system}'s default")
            except (UsageError, TypeError, ValueError):
                draft.miss_always(name, value, "its value cannot be read")
        elif is_stated:
            close = nearest(name, rules)
            hint = f"; did you mean {close}?" if close else ""
            draft.miss_always(name, value, f"not an option that this translator knows{hint}")


def _rule_of(rules: Mapping[str, Rule], name: str) -> Rule | None:
    tables = (name.rsplit(".", n)[0] for n in range(1, name.count(".") + 1))
    return rules.get(name) or next(
        (rules[f"{table}.*"] for table in tables if f"{table}.*" in rules), None
    )


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
        raise UsageError(f"a number is expected, not {value!r}") from error


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
