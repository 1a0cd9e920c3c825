"""Trees of segments: what several sequences have in common stands once.

The prompt of n responses, the shared opening of a chosen and a rejected answer, the history of an
agent's branches: all are common prefixes, so one rule finds them, a radix tree over token ids.
Packing trees for training follows the idea of Tree Training (arXiv:2511.00413).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

MIN_SHARED = 8  # a shorter common stretch costs more in extra segments than it saves


@dataclass(frozen=True, slots=True)
class Segment:
    """A run of tokens of one sequence: `tokens[begin:end]` of sequence `owner`, under `parent`.

    `parent` is the number of the segment before it on the path, -1 for a root. `begin` is also the
    position of its first token.
    """

    owner: int
    begin: int
    end: int
    parent: int


@dataclass(frozen=True, slots=True)
class Tree:
    """Segments in depth-first order (a parent stands before its children, a subtree in one run).

    paths: for each sequence the segments that spell it, root first.
    """

    segments: tuple[Segment, ...]
    paths: tuple[tuple[int, ...], ...]

    @property
    def n_tokens(self) -> int:
        """Tokens that a forward pass computes."""
        return sum(segment.end - segment.begin for segment in self.segments)


def common_prefix(a: NDArray[np.int32], b: NDArray[np.int32]) -> int:
    """How many leading tokens two sequences share."""
    n = min(len(a), len(b))
    different = np.flatnonzero(a[:n] != b[:n])
    return int(different[0]) if len(different) else n


def grow(sequences: Sequence[NDArray[np.int32]], min_shared: int = MIN_SHARED) -> Tree:
    """The tree of a group of non-empty sequences; stretches under `min_shared` are not shared."""
    order = sorted(range(len(sequences)), key=lambda i: sequences[i].astype(">u4").tobytes())
    lcp = [0] + [common_prefix(sequences[a], sequences[b]) for a, b in pairwise(order)]
    segments: list[Segment] = []
    paths: list[tuple[int, ...]] = [()] * len(sequences)

    def add(owner: int, begin: int, end: int, path: tuple[int, ...]) -> tuple[int, ...]:
        if begin == end:  # the sequence ends where its parent ends
            return path
        segments.append(Segment(owner, begin, end, path[-1] if path else -1))
        return (*path, len(segments) - 1)

    # Sorted neighbours share the longest prefixes, so an interval of `order` is a subtree and the
    # smallest lcp inside it is the depth where it branches. A stack, for agents' deep histories.
    stack: list[tuple[int, int, int, tuple[int, ...]]] = [(0, len(order), 0, ())]
    while stack:
        low, high, depth, path = stack.pop()
        first = order[low]
        if high - low == 1:
            paths[first] = add(first, depth, len(sequences[first]), path)
            continue
        branch = min(lcp[low + 1 : high])
        if branch - depth >= min_shared:
            path, depth = add(first, depth, branch, path), branch
        bounds = [low, *(i for i in range(low + 1, high) if lcp[i] == branch), high]
        children = list(pairwise(bounds))
        stack.extend((a, b, depth, path) for a, b in reversed(children))
    return Tree(tuple(segments), tuple(paths))
