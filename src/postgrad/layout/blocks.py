"""Attention over a layout as a few batched, nearly rectangular blocks.

Each segment attends to its path: its ancestors and itself. Long segments are cut into runs of
queries, so that no scores are computed for keys after the run. Runs of similar shape are stacked:
one kernel call for hundreds of short answers instead of one call each. Padding exists only inside
a block's scores, never in the tokens that the rest of the model computes.
"""

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from postgrad.layout.layout import Layout

QUERY_RUN = 128  # most queries of one segment in a run
MAX_WASTE = 1.3  # a block's scores, padding included, over the scores that its runs need
MAX_SCORES = 2**22  # most query rows x keys of one block, for one head
NEVER = np.iinfo(np.int64).max  # the position of a padding key: no query is that late


@dataclass(frozen=True, slots=True)
class Block:
    """B runs of at most Q queries over at most K keys.

    A query sees the keys whose position is not after its own: all keys of a run lie on one path,
    where positions rise.
    """

    query_rows: NDArray[np.int64]  # [B, Q] rows of the layout; padding repeats a run's last row
    key_rows: NDArray[np.int64]  # [B, K] likewise
    query_positions: NDArray[np.int64]  # [B, Q]
    key_positions: NDArray[np.int64]  # [B, K]; NEVER at padding


@dataclass(frozen=True, slots=True)
class BlockPlan:
    """All blocks of a layout, and how their outputs are put back in its order."""

    blocks: tuple[Block, ...]
    source_row: NDArray[np.int64]  # [T] place of each layout row in the blocks' outputs end to end


def plan_blocks(layout: Layout) -> BlockPlan:
    """The blocks of a layout; every row is a query of exactly one of them."""
    runs = [
        (np.arange(start, end), path[: len(path) - (stop - end)])
        for segment, (begin, stop) in enumerate(pairwise(layout.segment_start.tolist()))
        for path in [layout.path_rows(segment)]
        for start in range(begin, stop, QUERY_RUN)
        for end in [min(start + QUERY_RUN, stop)]
    ]
    runs.sort(key=lambda run: (len(run[1]), len(run[0])), reverse=True)
    blocks: list[Block] = []
    source_row = np.empty(layout.n_tokens, np.int64)
    done = 0
    for stack in _stacks(runs):
        block = _block(stack, layout.positions)
        for i, (queries, _) in enumerate(stack):
            source_row[queries] = done + i * block.query_rows.shape[1] + np.arange(len(queries))
        done += block.query_rows.size
        blocks.append(block)
    return BlockPlan(tuple(blocks), source_row)


QueryRun = tuple[NDArray[np.int64], NDArray[np.int64]]  # query rows, key rows


def _stacks(runs: list[QueryRun]) -> list[list[QueryRun]]:
    """Runs, sorted by shape, in stacks; a new stack begins where one more run would add too much
    padding.
    """
    stacks: list[list[QueryRun]] = []
    needed, widest = 0, 0
    for run in runs:
        queries, keys = len(run[0]), len(run[1])
        if stacks:
            count = len(stacks[-1]) + 1
            area = count * max(widest, queries) * len(stacks[-1][0][1])
            if area <= min(MAX_WASTE * (needed + queries * keys), MAX_SCORES):
                stacks[-1].append(run)
                needed, widest = needed + queries * keys, max(widest, queries)
                continue
        stacks.append([run])
        needed, widest = queries * keys, queries
    return stacks


def _block(stack: list[QueryRun], positions: NDArray[np.int64]) -> Block:
    width = max(len(queries) for queries, _ in stack)
    depth = max(len(keys) for _, keys in stack)
    query_rows = np.stack([np.pad(q, (0, width - len(q)), mode="edge") for q, _ in stack])
    key_rows = np.stack([np.pad(k, (0, depth - len(k)), mode="edge") for _, k in stack])
    key_positions = positions[key_rows]
    for i, (_, keys) in enumerate(stack):
        key_positions[i, len(keys) :] = NEVER
    return Block(query_rows, key_rows, positions[query_rows], key_positions)
