"""Cuts an update into micro-batches that fit a budget, and divides it over replicas by tokens: pure
functions, equal on every rank.
"""

import heapq
from collections.abc import Callable, Sequence

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
    `max_sequences` sequences. Groups stay together where they fit. A group that does not fit is
    split between its sequences, or with `whole_groups` (pairs, group losses) is a ValueError. A
    single sequence that is too long is a ValueError too.
    """

    cost = _costs(sequences, min_shared)

    def fits(tokens: int, count: int) -> bool:
        return (max_tokens is None or tokens <= max_tokens) and (
            max_sequences is None or count <= max_sequences
        )

    runs: list[list[int]] = []
    run_tokens = 0  # tokens of the last run

    def place(members: list[int], tokens: int) -> None:
        nonlocal run_tokens
        if not runs or not fits(run_tokens + tokens, len(runs[-1]) + len(members)):
            runs.append([])
            run_tokens = 0
        runs[-1] += members
        run_tokens += tokens

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


def _costs(sequences: Sequences, min_shared: int) -> Callable[[Sequence[int]], int]:
    """A function that counts the tokens that some sequences of one group take together."""
    shared_by = sequences.shared_by

    def cost(members: Sequence[int]) -> int:
        conversations = [
            shared_by.row(row)[begin:end]
            for row in members
            for begin, end in sequences.conversations(row)
        ]
        return grow(conversations, min_shared).n_tokens

    return cost


def groups_of(sequences: Sequences, rows: NDArray[np.int64]) -> list[list[int]]:
    """`rows` by their group; groups and members in the order of `rows`."""
    groups: dict[int, list[int]] = {}
    for row in rows.tolist():
        groups.setdefault(int(sequences.group[row]), []).append(row)
    return list(groups.values())


def _split(
    members: list[int], cost: Callable[[Sequence[int]], int], fits: Callable[[int, int], bool]
) -> list[list[int]]:
    """Consecutive parts of a group's sequences, each as large as fits."""
    parts: list[list[int]] = []
    for row in members:
        if parts and fits(cost([*parts[-1], row]), len(parts[-1]) + 1):
            parts[-1].append(row)
        elif fits(tokens := cost([row]), 1):
            parts.append([row])
        else:
            raise ValueError(f"sequence {row} alone has {tokens} tokens, over the token budget")
    return parts


def share(
    sequences: Sequences,
    rows: NDArray[np.int64],
    parts: int,
    *,
    whole_groups: bool = False,
    min_shared: int = MIN_SHARED,
) -> list[NDArray[np.int64]]:
    """`rows` in `parts` shares of about equally many computed tokens, each in the order of `rows`.

    Groups stay together, so that a common prefix is computed once. A group that is larger than a
    fair share is cut between its sequences, unless `whole_groups` (pairs, group losses). A share
    may be empty. Two shares differ by at most the tokens of the largest piece.
    """
    if parts == 1:
        return [rows]

    cost = _costs(sequences, min_shared)
    pieces = groups_of(sequences, rows)
    costs = [cost(members) for members in pieces]
    if not whole_groups:
        fair = sum(costs) / parts
        pieces = [
            piece
            for members, tokens in zip(pieces, costs, strict=True)
            for piece in _cut(members, min(len(members), int(np.ceil(tokens / max(fair, 1.0)))))
        ]
        costs = [cost(members) for members in pieces]
    place = {row: number for number, row in enumerate(rows.tolist())}
    return [
        np.array(
            sorted((row for i in numbers for row in pieces[i]), key=place.__getitem__), np.int64
        )
        for numbers in deal(costs, parts)
    ]


def deal(costs: Sequence[int], parts: int) -> list[list[int]]:
    """Indices of `costs` in `parts` lists of about equal sums: the largest cost first, each to the
    list with the least sum so far (Graham 1969). Sums differ by at most max(costs).
    """
    dealt: list[list[int]] = [[] for _ in range(parts)]
    heap = [(0, part) for part in range(parts)]
    for number in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        load, part = heapq.heappop(heap)
        dealt[part].append(number)
        heapq.heappush(heap, (load + costs[number], part))
    return dealt


def _cut(members: list[int], pieces: int) -> list[list[int]]:
    """`members` in `pieces` consecutive lists of nearly equal lengths."""
    return [part.tolist() for part in np.array_split(np.array(members, np.int64), pieces)]
