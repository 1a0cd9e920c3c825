"""Divides an update's sequences over replicas by tokens: a pure function, equal on every rank."""

import heapq
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from postgrad.core.records import Sequences
from postgrad.layout.cut import groups_of
from postgrad.layout.tree import grow


def share(
    sequences: Sequences,
    rows: NDArray[np.int64],
    parts: int,
    *,
    whole_groups: bool = False,
) -> list[NDArray[np.int64]]:
    """`rows` in `parts` shares of about equally many computed tokens, each in the order of `rows`.

    Groups stay together, so that a common prefix is computed once. A group that is larger than a
    fair share is cut between its sequences, unless `whole_groups` (pairs, group losses). A share
    may be empty. Two shares differ by at most the tokens of the largest piece.
    """
    if parts == 1:
        return [rows]

    def cost(members: Sequence[int]) -> int:
        return grow([sequences.tokens.row(row) for row in members]).n_tokens

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
