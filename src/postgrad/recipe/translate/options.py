"""What a source said, under one name each, and which of it has been used."""

from collections.abc import Iterator, Mapping
from typing import Any, cast

from postgrad.core.errors import UsageError


class Options:
    """Options by name. `defaults` are what the source's system does where nothing is said."""

    def __init__(self, given: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
        self.given = dict(given)
        self.defaults = dict(defaults)
        self._used: set[str] = set()

    def said(self, name: str) -> bool:
        """Whether the source says it itself."""
        return self.given.get(name) is not None

    def take(self, name: str, default: Any = None) -> Any:
        """Its value, given or the system's default, else `default`; it counts as used."""
        self._used.add(name)
        if (value := self.given.get(name)) is not None:
            return value
        value = self.defaults.get(name)
        return default if value is None else value

    def number(self, name: str, default: int = 1) -> int:
        """`take` as a whole number. Raises UsageError for what is none."""
        value = self.take(name, default)
        try:
            return int(float(value))
        except (TypeError, ValueError) as error:
            raise UsageError(f"{name}: a number is wanted, not {value!r}") from error

    def texts(self, name: str) -> list[str]:
        """`take` as a list of words; a single one is a list, and commas part several."""
        value = self.take(name)
        if value is None:
            return []
        words = cast(list[Any], value) if isinstance(value, list) else str(value).split(",")
        return [text for word in words if (text := str(word).strip(" ,"))]

    def numbers(self, name: str) -> list[float]:
        """`take` as numbers; none for nothing."""
        try:
            return [float(text) for text in self.texts(name)]
        except ValueError as error:
            raise UsageError(f"{name}: numbers are wanted, not {self.take(name)!r}") from error

    def pair(self, name: str) -> tuple[float, float] | None:
        """`take` as two numbers, the lower first; None for nothing. Others are UsageErrors."""
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
        """`take` as a list of tables, without what is none."""
        value = self.take(name)
        found = cast(list[Any], value) if isinstance(value, list) else []
        return [cast(dict[str, Any], one) for one in found if isinstance(one, dict)]

    def rest(self) -> Iterator[tuple[str, Any, bool]]:
        """(name, value, whether it was given) of what nobody took, in the source's order."""
        for name, value in {**self.given, **self.defaults, **self.given}.items():
            if name not in self._used and value is not None:
                yield name, value, name in self.given
