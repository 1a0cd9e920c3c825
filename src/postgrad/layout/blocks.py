"""Attention over a layout as a few batched, nearly rectangular blocks.

Each segment attends to its path: its ancestors and itself. Long segments are cut into runs of
queries, so that a causal run does not score the keys after it. Runs of similar shape are stacked:
one kernel call for hundreds of short answers instead of one call each. Padding exists only inside
a block's scores, never in the tokens that the rest of the model computes.
"""

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from postgrad.layout.layout import Layout

QUERY_RUN = 128  # queries of one segment that are scored together
MAX_WASTE = 1.3  # a block's scores over the scores its runs need
MAX_SCORES = 2**22  # query rows x keys of one block, for one head
NEVER = np.iinfo(np.int64).max  # the position of a padding key: no query is that late


@dataclass(frozen=True, slots=True)
class Block:
    """B runs of at most Q queries over at most K keys.

    query_rows [B, Q], key_rows [B, K]: rows of the layout; padding repeats a row. A query sees a
    key where key_positions <= its query_positions: all keys of a run lie on one path, where
    positions rise, and padding keys lie at NEVER.
    """

    query_rows: NDArray[np.int64]
    key_rows: NDArray[np.int64]
    query_positions: NDArray[np.int64]
    key_positions: NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class BlockPlan:
    """blocks, and where each layout row stands in their outputs laid end to end: source_row [T]."""

    blocks: tuple[Block, ...]
    source_row: NDArray[np.int64]


def plan_blocks(layout: Layout) -> BlockPlan:
    """Every row of the layout is a query of exactly one block."""
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
    """Runs sorted by shape, cut greedily where stacking one more would waste too much."""
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
