"""Which rows read which prompt: stretches of the cache that several rows share.

Stretches 0..count-1 are in use; when the last row of one ends, the last stretches move into the
holes. For attention the rows of a stretch are its *lanes*, all stretches equally many, so that one
batch of products serves them all.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

LANES = 16  # rows of a stretch: bounds what stretches with few rows compute in vain


def close_gaps(
    count: int, gone: NDArray[np.int64]
) -> tuple[int, NDArray[np.int64], NDArray[np.int64]]:
    """How 0..count-1 becomes dense again without `gone`, which ascends.

    Returns how many are left and (to, source): those from the end that move, and whereto.
    """
    left = count - len(gone)
    tail = np.arange(left, count)
    return left, gone[gone < left], tail[~np.isin(tail, gone)]


@dataclass(frozen=True, slots=True)
class PromptLanes:
    """The first N rows by the prompts that they read: A stretches of `width` lanes.

    lengths: [A] tokens of each prompt. row_of_lane: [A * width], any row where a lane is empty.
    lane_of_row: [N], counted through all stretches; 0 for rows that are idle.
    """

    lengths: NDArray[np.int64]
    width: int
    row_of_lane: NDArray[np.int64]
    lane_of_row: NDArray[np.int64]


class SharedPrompts:
    """Book-keeping of the prompts' stretches, at most `capacity` of them.

    `name` says which computed prompt a stretch has: rows of the same one share it.
    """

    def __init__(self, capacity: int) -> None:
        self.count = 0
        self.length = np.zeros(capacity, np.int64)
        self.name = np.zeros(capacity, np.int64)
        self._rows = np.zeros(capacity, np.int64)

    def join(self, name: int, length: int, rows: int) -> tuple[NDArray[np.int64], list[int]]:
        """Stretches for some new rows: [rows], and those of them that have to be filled."""
        joined: list[int] = []
        opened: list[int] = []
        for number in np.flatnonzero(self.name[: self.count] == name):
            room = min(LANES - int(self._rows[number]), rows - len(joined))
            joined += [int(number)] * room
        while len(joined) < rows:
            opened.append(self.count)
            joined += [self.count] * min(LANES, rows - len(joined))
            self.length[self.count], self.name[self.count] = length, name
            self._rows[self.count] = 0
            self.count += 1
        stretches = np.array(joined, np.int64)
        np.add.at(self._rows, stretches, 1)
        return stretches, opened

    def keep(self, stretches: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Free what no row reads any more. Returns (to, source): the stretches that moved.

        stretches: [rows] what each row reads; renamed in place where it moved.
        """
        used = np.bincount(stretches, minlength=self.count)
        left, to, source = close_gaps(self.count, np.flatnonzero(used == 0))
        new_number = np.arange(self.count)
        new_number[source] = to
        stretches[:] = new_number[stretches]
        self.length[to], self.name[to] = self.length[source], self.name[source]
        self.count = left
        self._rows[:left] = np.bincount(stretches, minlength=left)
        return to, source

    def lanes(self, stretches: NDArray[np.int64], rows_computed: int) -> PromptLanes:
        """The lanes of the rows that read `stretches`, of `rows_computed`; the rest are idle."""
        count = int(stretches.max()) + 1
        rows = np.bincount(stretches, minlength=count)
        width = int(rows.max())
        order = np.argsort(stretches, kind="stable")
        first = np.cumsum(rows) - rows
        lane = np.empty(len(stretches), np.int64)
        lane[order] = np.arange(len(stretches)) - first[stretches[order]]
        lane += stretches * width
        row_of_lane = np.zeros(count * width, np.int64)
        row_of_lane[lane] = np.arange(len(stretches))
        idle = rows_computed - len(stretches)
        return PromptLanes(self.length[:count], width, row_of_lane, np.pad(lane, (0, idle)))
