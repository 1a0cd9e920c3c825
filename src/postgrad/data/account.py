"""Accounts of rows: what became of every row of a dataset, each counted exactly once."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from postgrad.core.errors import UsageError
from postgrad.core.text import how_many
from postgrad.data.packed import notes_of_place
from postgrad.data.rows import Row
from postgrad.data.settings import RowSettings

Fate = Literal[
    "kept",
    "truncated",
    "filtered",
    "excluded",
    "trained",
    "contaminated",
    "duplicate",
    "equal",
    "empty",
    "too_long",
    "no_loss",
    "unreadable",
]
MEANING: Mapping[Fate, str] = {
    "kept": "kept",
    "truncated": "kept, cut to the limit",
    "filtered": "left out by data.filter",
    "excluded": "left out: held out for evaluation",
    "trained": "left out: trained on (data.eval_fraction)",
    "contaminated": "left out: shares words in a row with a held-out question",
    "duplicate": "left out: repeats a row before it",
    "equal": "dropped: chosen and rejected are the same",
    "empty": "dropped: an answer is empty or missing",
    "too_long": "dropped: over the limit",
    "no_loss": "dropped: no token to learn from",
    "unreadable": "dropped: a verifier cannot read the reference answer",
}
HEADINGS: Mapping[Fate, str] = {
    "kept": "kept whole",
    "truncated": "kept, cut",
    "filtered": "filtered",
    "excluded": "held out",
    "trained": "trained on",
    "contaminated": "shared words",
    "duplicate": "duplicate",
    "equal": "equal",
    "empty": "empty",
    "too_long": "too long",
    "no_loss": "no loss",
    "unreadable": "unreadable",
}
LOST: tuple[Fate, ...] = (  # the others are left out on purpose
    "equal",
    "empty",
    "too_long",
    "no_loss",
    "unreadable",
)


@dataclass(frozen=True, slots=True)
class RowAccount:
    """What became of the rows of one dataset. Raises AssertionError where `fates` miss a row."""

    name: str  # of the dataset, as dataset_name gives it
    rows: int  # all that were read
    fates: Mapping[Fate, int]  # rows by fate; they add up to `rows`
    examples: Mapping[Fate, str]  # the place of the first row of each fate: "train.jsonl:7"
    notes: tuple[str, ...] = ()  # for people: how the rows were read, whether a cache was used

    def __post_init__(self) -> None:
        if sum(self.fates.values()) != self.rows:
            raise AssertionError(f"{self.name}: {self.rows} rows, accounted for {self.fates}")

    @property
    def kept(self) -> int:
        """How many rows are used, those that were cut included."""
        return self.fates.get("kept", 0) + self.fates.get("truncated", 0)

    def lines(self) -> list[str]:
        """The account as text: rows read and kept, then `remarks`."""
        return [f"{self.name}: {how_many(self.rows, 'row')}, {self.kept} kept", *self.remarks()]

    def remarks(self) -> list[str]:
        """A line for each fate but "kept", with its first row as an example, then the notes."""
        fate_lines = [
            f"  {count:>7}  {MEANING[fate]}, such as {self.examples[fate]}"
            for fate, count in self.fates.items()
            if fate != "kept"
        ]
        return [*fate_lines, *(f"  {note}" for note in self.notes)]

    def to_json(self) -> dict[str, Any]:
        """The account as an event of events.jsonl: one key a fate."""
        notes = {"notes": list(self.notes)} if self.notes else {}
        return {"dataset": self.name, "rows": self.rows, **self.fates, **notes}


def table(accounts: Sequence[RowAccount]) -> tuple[list[str], list[list[str]]]:
    """Headings and lines of one table: a line for each dataset, with their sum last if there are
    several; a column for each fate that occurs, so that a line's counts add up to its rows.
    """
    fates: list[Fate] = [
        fate for fate in MEANING if any(fate in account.fates for account in accounts)
    ]
    counts = [
        [account.rows, *(account.fates.get(fate, 0) for fate in fates)] for account in accounts
    ]
    names = [account.name for account in accounts]
    if len(accounts) > 1:
        counts.append([sum(column) for column in zip(*counts, strict=True)])
        names.append("together")
    lines = [[name, *map(str, line)] for name, line in zip(names, counts, strict=True)]
    return ["dataset", "rows", *(HEADINGS[fate] for fate in fates)], lines


@dataclass(slots=True)
class Bookkeeper:
    """Counts rows by fate while a dataset is read; `close` makes the RowAccount."""

    name: str  # of the dataset
    read: int = 0  # rows before any filter
    counts: Counter[Fate] = field(default_factory=Counter)
    examples: dict[Fate, str] = field(default_factory=dict)  # place of the first row of each fate
    firsts: dict[Fate, int] = field(default_factory=dict)  # its index in the dataset
    notes: list[str] = field(default_factory=list)

    def add(self, fate: Fate, row: Row, count: int = 1) -> None:
        """Counts a row under its fate, or the first of `count` rows; the first row of each fate in
        the dataset becomes the example.
        """
        self.counts[fate] += count
        if row.index < self.firsts.get(fate, row.index + 1):
            self.firsts[fate], self.examples[fate] = row.index, row.place

    def close(self, settings: RowSettings, limit: str) -> RowAccount:
        """The finished account. limit: the length limit in words, for messages.

        Raises UsageError where no row is left, or where the rows of LOST are more than
        data.max_lost_fraction of the usable ones. Rows that the recipe leaves out on purpose (by
        data.filter, held out, duplicates) are not lost.
        """
        rows = self.read
        fates: dict[Fate, int] = {fate: n for fate in MEANING if (n := self.counts[fate])}
        notes = (*self.notes, *notes_of_place())
        account = RowAccount(self.name, rows, fates, dict(self.examples), notes)
        lost = sum(self.counts[fate] for fate in LOST)
        usable = account.kept + lost
        if not account.kept:
            side = "higher" if self.counts["trained"] else "lower"
            way_out = f"; try a {side} data.eval_fraction" if settings.eval_fraction else ""
            remedy = ""
            if self.counts["excluded"] == rows and not settings.eval_fraction:
                remedy = (
                    "\nDo [data] and [eval] name the same rows? Give [eval] a path or a split of "
                    "its own, or hold out a part of the rows with data.eval_fraction. Are the "
                    'questions alike on purpose? data.held_out = "row" compares all columns, '
                    '"none" leaves nothing out'
                )
            if lost:
                way_out += f"; {self._regained(settings)}"
            raise UsageError(
                f"{self.name}: no row of {rows} is left to use (limit: {limit}){way_out}:\n"
                + "\n".join(account.lines())
                + remedy
            )
        if lost > settings.max_lost_fraction * usable:
            raise UsageError(
                f"{self.name}: {lost} of {usable} rows are lost, more than data.max_lost_fraction "
                f"= {settings.max_lost_fraction:g} (limit: {limit}); {self._regained(settings)}:\n"
                + "\n".join(account.lines())
            )
        return account

    def _regained(self, settings: RowSettings) -> str:
        """What to do about rows that are lost."""
        if settings.on_too_long == "truncate" and self.counts["no_loss"]:
            return "raise data.max_len"
        if self.counts["too_long"]:
            return 'raise data.max_len, or cut rows with data.on_too_long = "truncate"'
        return "fix the rows, or leave them out with data.filter"
