"""Attention over a layout as a few batched, nearly rectangular blocks.

Each segment attends to its path: its ancestors and itself. Long segments are cut into runs of
queries, so that no scores are computed for keys after the run. Runs of similar shape are stacked:
one kernel call for hundreds of short answers instead of one call each. Padding exists only inside
a block's scores, never in the tokens that the rest of the model computes.

A kernel that walks over squares of the score matrix itself (flex attention) reads a table instead:
which squares hold visible pairs (`block_table`).
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from postgrad.layout.layout import Layout

QUERY_RUN = 128  # most queries of one segment in a run
MAX_WASTE = 1.1  # a block's scores, padding included, over the scores that its runs need
CALL = 2048  # and so many more: in their time a kernel call of their own would begin
MAX_SCORES = 2**22  # most query rows x keys of one block, for one head
NEVER = np.iinfo(np.int64).max  # the position of a padding key: no query is that late


@dataclass(frozen=True, slots=True)
class Block:
    """B runs of at most Q queries over at most K keys.

    A query sees the keys whose position is not after its own: all keys of a run lie on one path,
    where positions rise. A token of an image that is seen whole also sees the others of the image.
    """

    query_rows: NDArray[np.int64]  # [B, Q] rows of the layout; padding repeats a run's last row
    key_rows: NDArray[np.int64]  # [B, K] likewise
    query_positions: NDArray[np.int64]  # [B, Q]
    key_positions: NDArray[np.int64]  # [B, K]; NEVER at padding
    seen: NDArray[np.int64] | None  # [2, B, Q] Layout.seen of the queries


@dataclass(frozen=True, slots=True)
class BlockPlan:
    """All blocks of a layout, and how their outputs are put back in its order."""

    blocks: tuple[Block, ...]
    # [T] place of each layout row in the blocks' outputs end to end; 0 of rows that are no queries
    source_row: NDArray[np.int64]


def plan_blocks(layout: Layout, first: NDArray[np.int64] | None = None) -> BlockPlan:
    """The blocks of a layout; every row is a query of exactly one of them. first: [segments] the
    first row of each segment that is a query; None: all are.
    """
    begins = layout.segment_start[:-1] if first is None else first
    runs = [
        (np.arange(start, end), path[: len(path) - (stop - _end_of_seen(layout, start, end))])
        for segment, stop in enumerate(layout.segment_start[1:].tolist())
        for path in [layout.path_rows(segment)]
        for start in range(int(begins[segment]), stop, QUERY_RUN)
        for end in [min(start + QUERY_RUN, stop)]
    ]
    runs.sort(key=lambda run: (len(run[1]), len(run[0])), reverse=True)
    blocks: list[Block] = []
    source_row = np.zeros(layout.n_tokens, np.int64)
    done = 0
    for stack in stacks(runs):
        block = _block(stack, layout)
        for i, (queries, _) in enumerate(stack):
            source_row[queries] = done + i * block.query_rows.shape[1] + np.arange(len(queries))
        done += block.query_rows.size
        blocks.append(block)
    return BlockPlan(tuple(blocks), source_row)


QueryRun = tuple[NDArray[np.int64], NDArray[np.int64]]  # query rows, key rows


def stacks(runs: list[QueryRun]) -> list[list[QueryRun]]:
    """Runs, sorted by shape, in stacks; a new stack begins where one more run would add too much
    padding.
    """
    stacked: list[list[QueryRun]] = []
    needed, widest = 0, 0
    for run in runs:
        queries, keys = len(run[0]), len(run[1])
        if stacked:
            count = len(stacked[-1]) + 1
            area = count * max(widest, queries) * len(stacked[-1][0][1])
            if area <= min(MAX_WASTE * (needed + queries * keys) + CALL, MAX_SCORES):
                stacked[-1].append(run)
                needed, widest = needed + queries * keys, max(widest, queries)
                continue
        stacked.append([run])
        needed, widest = queries * keys, queries
    return stacked


def _end_of_seen(layout: Layout, start: int, end: int) -> int:
    """The row after the last one that rows start .. end - 1 of a segment see."""
    if layout.seen is None:
        return end
    return max(end, end + int((layout.seen[1, start:end] - layout.positions[end - 1]).max()))


def _block(stack: list[QueryRun], layout: Layout) -> Block:
    positions = layout.positions
    width = max(len(queries) for queries, _ in stack)
    depth = max(len(keys) for _, keys in stack)
    query_rows = np.stack([np.pad(q, (0, width - len(q)), mode="edge") for q, _ in stack])
    key_rows = np.stack([np.pad(k, (0, depth - len(k)), mode="edge") for _, k in stack])
    key_positions = positions[key_rows]
    for i, (_, keys) in enumerate(stack):
        key_positions[i, len(keys) :] = NEVER
    seen = None if layout.seen is None else layout.seen[:, query_rows]
    return Block(query_rows, key_rows, positions[query_rows], key_positions, seen)


@dataclass(frozen=True, slots=True)
class BlockTable:
    """The squares of a score matrix [T, T] that hold visible pairs. It has R x R squares of equally
    many rows and keys, the last ones partly beyond T.

    `key_...`: for each square of queries the squares of keys. A row of `key_indices` begins with
    those that hold some visible pairs and some hidden ones, in rising order; `key_counts` says how
    many they are, and the others follow. The `full_` ones hold no hidden pair. `query_...`: the
    same, the other way round.
    """

    key_counts: NDArray[np.int32]  # [R]
    key_indices: NDArray[np.int32]  # [R, R]
    full_key_counts: NDArray[np.int32]
    full_key_indices: NDArray[np.int32]
    query_counts: NDArray[np.int32]
    query_indices: NDArray[np.int32]
    full_query_counts: NDArray[np.int32]
    full_query_indices: NDArray[np.int32]

    @property
    def arrays(self) -> tuple[NDArray[np.int32], ...]:
        """In the order of torch's BlockMask."""
        return (
            self.key_counts, self.key_indices, self.full_key_counts, self.full_key_indices,
            self.query_counts, self.query_indices, self.full_query_counts, self.full_query_indices,
        )  # fmt: skip


def block_table(layout: Layout, window: int | None, size: int) -> BlockTable:
    """The table of a layout in squares of `size` (more than 1) rows and keys. window: positions
    that a query sees at most, its own included; None: its whole path.

    No pair is looked at. The key at row k is seen by rows k .. subtree_end[k] - 1, so below the
    diagonal a square holds a visible pair if the longest of its subtrees reaches the first query,
    and no hidden one if the shortest reaches the last query.
    """
    begin = np.arange(0, layout.n_tokens, size)
    below = np.tri(len(begin), k=-1, dtype=np.bool_)
    some = below & (np.maximum.reduceat(layout.subtree_end, begin) > begin[:, None])
    full = below & (np.minimum.reduceat(layout.subtree_end, begin) >= begin[:, None] + size)
    if window is not None:
        some = _within_window(layout, window, size)
        latest = np.maximum.reduceat(layout.positions, begin)[:, None]
        full &= latest - np.minimum.reduceat(layout.positions, begin) < window
    partial = some & ~full
    np.fill_diagonal(partial, val=True)  # a token sees itself, and none after it
    return BlockTable(*_listed(partial), *_listed(full), *_listed(partial.T), *_listed(full.T))


def _within_window(layout: Layout, window: int, size: int) -> NDArray[np.bool_]:
    """[R, R] whether a square below the diagonal holds a pair that is visible in a window.

    Queries after the first of a square may stand nearer to a key than it does: a sibling's branch
    begins again at lower positions. So the nearest one counts of those that the key's subtree has.
    """
    positions, ends = layout.positions, layout.subtree_end
    roots = layout.segment_start[:-1][layout.parent < 0]
    begin = np.arange(0, layout.n_tokens, size)
    some = np.zeros((len(begin), len(begin)), np.bool_)
    for square, first in enumerate(begin.tolist()):
        root = int(roots[np.searchsorted(roots, first, "right") - 1])
        keys = root + np.flatnonzero(ends[root:first] > first)
        nearest = np.minimum.accumulate(positions[first : first + size])
        reached = np.minimum(ends[keys] - first, len(nearest)) - 1
        near = nearest[reached] - positions[keys] < window
        some[square, keys[near] // size] = True
    return some


def _listed(squares: NDArray[np.bool_]) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """[R] the number of squares in each row; [R, R] which, before the others."""
    order = np.argsort(~squares, axis=-1, kind="stable")
    return squares.sum(-1, dtype=np.int32), order.astype(np.int32)
