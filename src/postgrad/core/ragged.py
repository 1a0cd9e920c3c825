"""Ragged columns: one value per token, sequences of different lengths, no padding."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Ragged:
    """A column of N values over S sequences of different lengths.

    `values[offsets[i]:offsets[i + 1]]` belongs to sequence i.

    >>> Ragged.of([[1, 2], [3]]).row(0).tolist()
    [1, 2]
    """

    values: NDArray[Any]  # [N]
    offsets: NDArray[np.int64]  # [S + 1], rising from 0 to N

    def __post_init__(self) -> None:
        if self.offsets[0] != 0 or self.offsets[-1] != len(self.values):
            raise ValueError(f"offsets end at {self.offsets[-1]}, values at {len(self.values)}")
        if np.any(np.diff(self.offsets) < 0):
            raise ValueError("offsets have to rise")

    @classmethod
    def of(cls, rows: Iterable[Sequence[Any] | NDArray[Any]], dtype: Any = None) -> "Ragged":
        """The column of rows of any lengths. dtype: of the values; None: as NumPy chooses."""
        arrays = [np.asarray(row, dtype) for row in rows]
        lengths = np.array([len(row) for row in arrays], np.int64)
        offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])
        values = np.concatenate(arrays) if arrays else np.zeros(0, dtype)
        return cls(values, offsets)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __iter__(self) -> Iterator[NDArray[Any]]:
        return (self.row(i) for i in range(len(self)))

    def row(self, i: int) -> NDArray[Any]:
        """The values of sequence i: a view."""
        return self.values[self.offsets[i] : self.offsets[i + 1]]

    @property
    def lengths(self) -> NDArray[np.int64]:
        """[S] number of values of each sequence."""
        return np.diff(self.offsets)

    @property
    def rows(self) -> NDArray[np.int64]:
        """[N] the sequence that each value belongs to."""
        return np.repeat(np.arange(len(self)), self.lengths)

    def like(self, values: NDArray[Any]) -> "Ragged":
        """Other values [N] over the same sequences."""
        return Ragged(values, self.offsets)

    def sums(self) -> NDArray[np.float64]:
        """[S] the sum of each sequence in float64; an empty one sums to 0."""
        weights = self.values.astype(np.float64)
        return np.bincount(self.rows, weights, minlength=len(self)).astype(np.float64)

    def spread(self, per_sequence: NDArray[Any]) -> "Ragged":
        """[S] values, each repeated over the tokens of its sequence."""
        return self.like(np.repeat(per_sequence, self.lengths))

    def take(self, rows: Sequence[int] | NDArray[np.int64]) -> "Ragged":
        """The named sequences, in the order named."""
        return Ragged.of([self.row(int(i)) for i in rows], self.values.dtype)

    def take_many(self, rows: NDArray[np.int64]) -> "Ragged":
        """As `take`, where rows are many and short: without a step for each of them."""
        lengths = self.lengths[rows]
        starts = np.cumsum(lengths) - lengths
        moved = np.repeat(self.offsets[:-1][rows] - starts, lengths)
        return Ragged.of_sizes(self.values[moved + np.arange(len(moved))], lengths)

    @classmethod
    def of_sizes(cls, values: NDArray[Any], sizes: NDArray[Any]) -> "Ragged":
        """Values [N] of sequences of so many each [S], one behind the other."""
        return cls(
            values, np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes, dtype=np.int64)])
        )

    @classmethod
    def joined(cls, columns: Sequence["Ragged"], dtype: Any) -> "Ragged":
        """The sequences of several columns, one column behind the other. dtype: of the values."""
        sizes = [np.zeros(0, np.int64), *(column.lengths for column in columns)]
        values = [np.zeros(0, dtype), *(column.values for column in columns)]
        return cls.of_sizes(np.concatenate(values), np.concatenate(sizes))

    @classmethod
    def empty(cls, count: int, dtype: Any) -> "Ragged":
        """`count` sequences without a value."""
        return cls(np.zeros(0, dtype), np.zeros(count + 1, np.int64))
