"""Cutting an update into micro-batches that fit: a pure function of lengths and a budget."""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from postgrad.core.records import Sequences
from postgrad.layout.tree import MIN_SHARED, grow


def cut(
    sequences: Sequences,
    rows: NDArray[np.int64],
    *,
    max_tokens: int | None = None,
    max_sequences: int | None = None,
    whole_groups: bool = False,
    min_shared: int = MIN_SHARED,
) -> list[NDArray[np.int64]]:
    """`rows` in their order, cut into runs for one forward each.

    A run computes at most `max_tokens` tokens (shared prefixes counted once) and holds at most
    `max_sequences` sequences. Groups stay together where they fit; one that does not is split
    between its sequences, or, with `whole_groups` (pairs, group losses), is a ValueError, as is a
    single sequence that is too long.
    """

    def cost(members: list[int]) -> int:
        return grow([sequences.tokens.row(row) for row in members], min_shared).n_tokens

    def fits(tokens: int, count: int) -> bool:
        return (max_tokens is None or tokens <= max_tokens) and (
            max_sequences is None or count <= max_sequences
        )

    runs: list[list[int]] = []
    room_tokens, room_count = 0, 0  # already in the last run

    def place(members: list[int], tokens: int) -> None:
        nonlocal room_tokens, room_count
        if not runs or not fits(room_tokens + tokens, room_count + len(members)):
            runs.append([])
            room_tokens, room_count = 0, 0
        runs[-1] += members
        room_tokens, room_count = room_tokens + tokens, room_count + len(members)

    for members in groups_of(sequences, rows):
        tokens = cost(members)
        if fits(tokens, len(members)):
            place(members, tokens)
            continue
        if whole_groups:
            raise ValueError(
                f"a group of {len(members)} sequences needs {tokens} tokens in one forward; "
                f"the limits are max_tokens={max_tokens}, max_sequences={max_sequences}"
            )
        for part in _split(members, cost, fits):
            place(part, cost(part))
    return [np.array(run, np.int64) for run in runs]


def groups_of(sequences: Sequences, rows: NDArray[np.int64]) -> list[list[int]]:
    """`rows` by their group, groups and members in the order in which they come."""
    groups: dict[int, list[int]] = {}
    for row in rows.tolist():
        groups.setdefault(int(sequences.group[row]), []).append(row)
    return list(groups.values())


def _split(
    members: list[int], cost: Callable[[list[int]], int], fits: Callable[[int, int], bool]
) -> list[list[int]]:
    """Runs of one group's sequences, each as long as fits."""
    parts: list[list[int]] = []
    for row in members:
        if parts and fits(cost([*parts[-1], row]), len(parts[-1]) + 1):
            parts[-1].append(row)
        elif fits(tokens := cost([row]), 1):
            parts.append([row])
        else:
            raise ValueError(f"sequence {row} alone has {tokens} tokens, over the token budget")
    return parts
