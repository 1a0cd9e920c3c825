"""The options of a source by name, and which of them have been used."""

from collections.abc import Iterator, Mapping
from typing import Any, cast

from postgrad.core.errors import UsageError


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
            raise UsageError(f"{name}: a number is wanted, not {value!r}") from error

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
            raise UsageError(f"{name}: numbers are wanted, not {self.take(name)!r}") from error

    def pair(self, name: str) -> tuple[float, float] | None:
        """`take` as two numbers, the lower first; None where the option has no value. Raises
        UsageError for anything else.
        """
        numbers = self.numbers(name)
        if numbers and (len(numbers) != 2 or numbers[0] > numbers[1]):
            raise UsageError(
                f"{name}: two numbers are wanted, the lower first, not {self.take(name)!r}"
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
