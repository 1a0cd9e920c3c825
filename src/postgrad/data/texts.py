"""The tokens of all rows of a dataset in a few long columns, and texts as places within them."""

from array import array
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from postgrad.core.errors import UsageError
from postgrad.data.account import Bookkeeper, Fate
from postgrad.data.packed import StoredBytes, StoredColumn
from postgrad.data.rows import PackedRows, Row

FATES: tuple[Fate, ...] = (
    *("kept", "truncated", "too_long", "no_loss", "equal", "duplicate", "unreadable"),
)
KEPT, TRUNCATED, TOO_LONG, NO_LOSS, EQUAL, DUPLICATE, UNREADABLE = range(len(FATES))
USED = (KEPT, TRUNCATED)
TOGETHER = 2**20  # tokens that are looked at at once


class MarkedTokens(NamedTuple):
    """A text of T tokens."""

    ids: NDArray[np.int32]  # [T]
    mask: NDArray[np.bool_]  # [T] which bear loss
    weights: NDArray[np.float32] | None = None  # [T] what each counts, 0 without loss; None: 1


class GrowingColumn:
    """A ragged column that gets one sequence after another."""

    def __init__(self, dtype: Any) -> None:
        self.dtype = np.dtype(dtype)
        self.stored = StoredBytes()
        self._lengths = array("q")

    def append(self, values: NDArray[Any]) -> None:
        """Adds a sequence, [T] of the column's type."""
        self.stored.add(np.ascontiguousarray(values, self.dtype).data)
        self._lengths.append(len(values))

    def column(self) -> StoredColumn:
        """All sequences; nothing can be added afterwards."""
        return StoredColumn(self.stored, self.dtype, _edges(self._lengths))


def _edges(lengths: "array[int] | NDArray[np.int64]") -> NDArray[np.int64]:
    """[S + 1] where sequences of these lengths begin and end."""
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths, dtype=np.int64)])


@dataclass(frozen=True, slots=True)
class TokenColumns:
    """The tokens of [S] rows: of each the tokens of its texts, one behind the other."""

    # token_ids: int32; loss_mask: bool, and others, as the kind of rows has them; over the same
    # sequences
    by_name: Mapping[str, StoredColumn]
    further: NDArray[np.int64]  # the places of tokens at which a further text of a row begins

    def __getitem__(self, name: str) -> StoredColumn:
        return self.by_name[name]

    def owners(self) -> NDArray[np.int64]:
        """The row of each of `further`."""
        offsets = self["token_ids"].offsets
        return np.searchsorted(offsets, self.further, side="right") - 1


def columns_of(texts: Iterable[MarkedTokens]) -> dict[str, StoredColumn]:
    """Columns token_ids and loss_mask, and loss_weights where a text has weights."""
    ids, mask = GrowingColumn(np.int32), GrowingColumn(np.bool_)
    weights: StoredBytes | None = None
    for text in texts:
        if text.weights is not None and weights is None:
            weights = StoredBytes()
            for piece in mask.stored.pieces():  # of the texts before it
                weights.add(np.frombuffer(piece, np.bool_).astype(np.float32).data)
        ids.append(text.ids)
        mask.append(text.mask)
        if weights is not None:
            of_text = text.mask if text.weights is None else text.weights
            weights.add(np.ascontiguousarray(of_text, np.float32).data)
    columns = {"token_ids": ids.column(), "loss_mask": mask.column()}
    if weights is not None:
        offsets = columns["loss_mask"].offsets
        columns["loss_weights"] = StoredColumn(weights, np.dtype(np.float32), offsets)
    return columns


def in_rows(
    texts: Iterable[MarkedTokens], counts: "array[int] | NDArray[np.int64]"
) -> TokenColumns:
    """The columns of texts joined into those of rows. counts: how many texts each row has, once all
    are there.
    """
    columns = columns_of(texts)
    offsets = columns["token_ids"].offsets
    edges = offsets[_edges(counts)]
    begins = offsets[:-1][columns["token_ids"].lengths > 0]
    joined = {name: replace(column, offsets=edges) for name, column in columns.items()}
    return TokenColumns(joined, begins[edges[np.searchsorted(edges, begins)] != begins])


def last_learned(
    mask: StoredColumn, begin: NDArray[np.int64], end: NDArray[np.int64]
) -> NDArray[np.int64]:
    """[S] where the last token that bears loss is in each text; -1 or a place before `begin` where
    there is none. mask: which of N tokens do; begin, end: [S], rising.
    """
    last = np.empty(len(begin), np.int64)
    start = 0
    while start < len(begin):  # texts of TOGETHER tokens, or a single one
        low = int(begin[start])
        stop = max(start + 1, int(np.searchsorted(end, low + TOGETHER, side="right")))
        high = int(end[start:stop].max())
        places = np.concatenate([[-1], low + np.flatnonzero(mask.part(low, high))])
        last[start:stop] = places[np.searchsorted(places, end[start:stop]) - 1]
        start = stop
    return last


def fates_of_lengths(
    lengths: NDArray[np.int64], max_len: int, on_too_long: str
) -> NDArray[np.int8]:
    """[S] KEPT, TRUNCATED or TOO_LONG for texts of so many tokens."""
    over = TRUNCATED if on_too_long == "truncate" else TOO_LONG
    return np.where(lengths > max_len, over, KEPT).astype(np.int8)


def too_long(max_len: int, of: str, row: Row, tokens: int | str) -> UsageError:
    """The error for a row of more than max_len tokens. of: what of the row has them."""
    return UsageError(
        f"{row.place}: {of}row {row.index} has {tokens} tokens, data.max_len is {max_len}; raise "
        'it, or say data.on_too_long = "drop" or "truncate"'
    )


def count_fates(book: Bookkeeper, fates: NDArray[np.int8], rows: PackedRows) -> None:
    """Counts rows by their fates, [R] numbers of FATES, as Bookkeeper.add does one by one."""
    codes, first, counts = np.unique(fates, return_index=True, return_counts=True)
    for code, place, count in zip(codes, first, counts, strict=True):
        book.add(FATES[code], rows[int(place)], int(count))
