"""Trees of segments, in which a common prefix of several sequences is held once.

The prompt of n responses, the shared opening of a chosen and a rejected answer, the history of an
agent's branches are all common prefixes: a radix tree over token ids finds them. Packing trees for
training follows the idea of Tree Training (arXiv:2511.00413).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

MIN_SHARED = 8  # tokens; sharing a shorter prefix costs more in extra segments than it saves
# As MIN_SHARED, where layers carry a state along the sequence: behind each shared prefix mixers are
# called anew. On a CPU that pays from 16 tokens on (benchmarks/hybrids.py); a GPU's launches cost
# more.
MIN_CONTINUED = 32
NO_SHARING = 2**62  # as MIN_SHARED: every sequence has its own copy of its prompt


@dataclass(frozen=True, slots=True)
class Segment:
    """A run of tokens: `tokens[begin:end]` of sequence `owner`."""

    owner: int  # a sequence that has these tokens
    begin: int  # also the position of the first token
    end: int
    parent: int  # number of the segment before it on the path; -1 for a root


@dataclass(frozen=True, slots=True)
class Tree:
    """The segments of a group of sequences."""

    segments: tuple[Segment, ...]  # depth-first: a parent before its children, a subtree in one run
    paths: tuple[tuple[int, ...], ...]  # for each sequence the numbers of its segments, root first

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
    """The tree of a group of non-empty sequences. Common stretches of fewer than `min_shared`
    tokens are not shared.
    """
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
