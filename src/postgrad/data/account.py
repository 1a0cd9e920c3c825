"""Where the rows of a dataset went: every one of them is counted once."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from postgrad.core.errors import UsageError
from postgrad.data.rows import Row
from postgrad.data.settings import DataSettings

Fate = Literal["kept", "truncated", "excluded", "too_long", "no_loss"]
MEANING: Mapping[Fate, str] = {
    "kept": "kept",
    "truncated": "kept, cut to the limit",
    "excluded": "left out: held out for evaluation",
    "too_long": "dropped: over the limit",
    "no_loss": "dropped: no token to learn from",
}
LOST: tuple[Fate, ...] = ("too_long", "no_loss")


@dataclass(frozen=True, slots=True)
class RowAccount:
    """fates: how many rows ended how; they add up to `rows`. examples: the place of the first."""

    name: str
    rows: int
    fates: Mapping[Fate, int]
    examples: Mapping[Fate, str]

    @property
    def kept(self) -> int:
        """Rows that are used, cut ones too."""
        return self.fates.get("kept", 0) + self.fates.get("truncated", 0)

    def lines(self) -> list[str]:
        """A small table for people; one line where every row was kept."""
        found = [f"{self.name}: {self.rows} rows, {self.kept} kept"]
        for fate, count in self.fates.items():
            if fate != "kept":
                example = self.examples[fate]
                found.append(f"  {count:>7}  {MEANING[fate]}, such as {example}")
        return found

    def to_json(self) -> dict[str, Any]:
        """For events.jsonl."""
        return {"dataset": self.name, "rows": self.rows, **self.fates}


@dataclass(slots=True)
class Bookkeeper:
    """Counts rows while a dataset is read."""

    name: str
    counts: Counter[Fate] = field(default_factory=Counter)
    examples: dict[Fate, str] = field(default_factory=dict)

    def add(self, fate: Fate, row: Row) -> None:
        """One row ended so."""
        self.counts[fate] += 1
        self.examples.setdefault(fate, row.place)

    def close(self, settings: DataSettings, limit: str) -> RowAccount:
        """The account. Raises UsageError where nothing is left or too much was lost.

        limit: in words, for the message. What is held out for evaluation is not lost.
        """
        rows = self.counts.total()
        fates: dict[Fate, int] = {fate: n for fate in MEANING if (n := self.counts[fate])}
        account = RowAccount(self.name, rows, fates, dict(self.examples))
        lost = sum(self.counts[fate] for fate in LOST)
        usable = rows - self.counts["excluded"]
        if not account.kept:
            raise UsageError(
                f"{self.name}: no row of {rows} is left to use (limit: {limit}):\n"
                + "\n".join(account.lines())
            )
        if lost > settings.max_lost_fraction * usable:
            raise UsageError(
                f"{self.name}: {lost} of {usable} rows are lost, more than data.max_lost_fraction "
                f"= {settings.max_lost_fraction:g} (limit: {limit}); raise data.max_len, or cut "
                'rows with data.on_too_long = "truncate":\n' + "\n".join(account.lines())
            )
        return account
