"""Keys of a layout's rows, which depend only on the tokens up to each row."""

from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from postgrad.core import seeds


def row_keys(
    token_ids: NDArray[np.int64],
    positions: NDArray[np.int64],
    segment_start: NDArray[np.int64],
    parent: NDArray[np.int64],
) -> NDArray[np.int64]:
    """[T] a key for each row of a Layout: a hash of the tokens on its path, the row's own included.

    A prefix has the same keys whether sequences share it or each has a copy, and whatever else is
    in the layout: dropout masks drawn from them (models/adapter_dropout.py) do not change with
    packing, sharing, order or the cut into micro-batches. Sequences that begin with the same tokens
    have the same keys there, also in different groups.
    """
    # A term depends on its position too, so that their sums modulo 2**64 depend on the order.
    terms = seeds.bits(0, "row key", token_ids, positions)
    keys = np.empty(len(terms), np.uint64)
    for segment, (begin, end) in enumerate(pairwise(segment_start.tolist())):
        above = int(parent[segment])
        before = keys[segment_start[above + 1] - 1] if above >= 0 else np.uint64(0)
        keys[begin:end] = np.cumsum(terms[begin:end], dtype=np.uint64)
        keys[begin:end] += before  # wraps; NumPy does not warn for in-place addition to an array
    return keys.view(np.int64)
