"""Names for the rows of a layout that depend on nothing but the tokens read so far."""

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
    """[T] a key for each row of a Layout: a hash of the tokens on its path up to and with itself.

    A prefix has the same keys whether it stands once for several sequences or in each of them, and
    whatever else lies in the layout: dropout masks drawn from them (models/adapter_dropout.py) do
    not change with packing, sharing, order or the cut into micro-batches. Sequences that begin with
    the same tokens have the same keys there, also in different groups.
    """
    # Terms differ by position, so their sum modulo 2**64 tells orders apart and rolls by cumsum.
    terms = seeds.bits(0, "row key", token_ids, positions)
    keys = np.empty(len(terms), np.uint64)
    for segment, (begin, end) in enumerate(pairwise(segment_start.tolist())):
        above = int(parent[segment])
        before = keys[segment_start[above + 1] - 1] if above >= 0 else np.uint64(0)
        keys[begin:end] = np.cumsum(terms[begin:end], dtype=np.uint64)
        keys[begin:end] += before  # wraps, without a warning where an array is added to
    return keys.view(np.int64)
