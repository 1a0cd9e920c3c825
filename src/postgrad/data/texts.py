"""The tokens of all rows of a dataset in a few large arrays, and texts as places within them."""

from array import array
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from postgrad.core.errors import UsageError
from postgrad.core.ragged import Ragged
from postgrad.data.account import Bookkeeper, Fate
from postgrad.data.packed import PackedRows
from postgrad.data.rows import Row

FATES: tuple[Fate, ...] = (
    *("kept", "truncated", "too_long", "no_loss", "equal", "duplicate", "unreadable"),
)
KEPT, TRUNCATED, TOO_LONG, NO_LOSS, EQUAL, DUPLICATE, UNREADABLE = range(len(FATES))
USED = (KEPT, TRUNCATED)
BLOCK = 2**14  # texts that are looked at together


class MarkedTokens(NamedTuple):
    """A text of T tokens."""

    ids: NDArray[np.int32]  # [T]
    mask: NDArray[np.bool_]  # [T] which bear loss
    weights: NDArray[np.float32] | None = None  # [T] what each counts, 0 without loss; None: 1


class GrowingColumn:
    """A ragged column that gets one sequence after another."""

    def __init__(self, dtype: Any) -> None:
        self._dtype = np.dtype(dtype)
        self._values = bytearray()
        self._lengths = array("q")

    def append(self, values: NDArray[Any]) -> None:
        """Adds a sequence, [T] of the column's type."""
        self._values += np.ascontiguousarray(values, self._dtype).data
        self._lengths.append(len(values))

    def column(self) -> Ragged:
        """All sequences; nothing can be added afterwards."""
        offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(self._lengths, dtype=np.int64)])
        return Ragged(np.frombuffer(self._values, self._dtype), offsets)


def columns_of(texts: Iterable[MarkedTokens]) -> dict[str, Ragged]:
    """Columns token_ids and loss_mask, and loss_weights where a text has weights."""
    ids, mask = GrowingColumn(np.int32), GrowingColumn(np.bool_)
    weighted: dict[int, NDArray[np.float32]] = {}  # by number of the text
    for number, text in enumerate(texts):
        ids.append(text.ids)
        mask.append(text.mask)
        if text.weights is not None:
            weighted[number] = text.weights
    columns = {"token_ids": ids.column(), "loss_mask": mask.column()}
    if weighted:
        weights = columns["loss_mask"].like(columns["loss_mask"].values.astype(np.float32))
        for number, of_text in weighted.items():
            weights.row(number)[:] = of_text
        columns["loss_weights"] = weights
    return columns


def in_rows(
    texts: Iterable[MarkedTokens], counts: "array[int] | NDArray[np.int64]"
) -> dict[str, Ragged]:
    """The columns of texts joined into those of rows, and starts, True where a text begins. counts:
    how many texts each row has, once all are there.
    """
    columns = columns_of(texts)
    ids = columns["token_ids"]
    starts = np.zeros(len(ids.values), np.bool_)
    starts[ids.offsets[:-1][ids.lengths > 0]] = True
    edges = ids.offsets[np.concatenate([np.zeros(1, np.int64), np.cumsum(counts, dtype=np.int64)])]
    columns["starts"] = ids.like(starts)
    return {name: Ragged(column.values, edges) for name, column in columns.items()}


@dataclass(frozen=True, slots=True)
class TokenStore:
    """Tokens of many texts and which of them bear loss, a bit for each."""

    ids: NDArray[np.int32]  # [N]
    bits: NDArray[np.uint8]  # [ceil(N / 8)] the mask, as np.packbits has it

    @classmethod
    def of(cls, ids: NDArray[np.int32], mask: NDArray[np.bool_]) -> "TokenStore":
        """Of N tokens and their mask [N]."""
        return cls(ids, np.packbits(mask))

    def part(self, begin: int, end: int) -> tuple[NDArray[np.int32], NDArray[np.bool_]]:
        """(ids, loss mask) of the tokens from `begin` to `end`: a view, and an array of its own."""
        first = begin // 8
        bits = np.unpackbits(self.bits[first : -(-end // 8)])
        mask = bits[begin - 8 * first : end - 8 * first].view(np.bool_)
        return self.ids[begin:end], mask


def last_learned(
    mask: NDArray[np.bool_], begin: NDArray[np.int64], end: NDArray[np.int64]
) -> NDArray[np.int64]:
    """[S] where the last token that bears loss is in each text; -1 or a place before `begin` where
    there is none. mask: [N]; begin, end: [S], rising.
    """
    last = np.empty(len(begin), np.int64)
    for start in range(0, len(begin), BLOCK):
        block = slice(start, start + BLOCK)
        low, high = int(begin[block][0]), int(end[block].max())
        places = np.concatenate([[-1], low + np.flatnonzero(mask[low:high])])
        last[block] = places[np.searchsorted(places, end[block]) - 1]
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
