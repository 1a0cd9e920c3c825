"""Aggregation weights: what one loss token counts for in the loss of its whole update.

A loss is the sum of weight * token loss over all loss entries of all micro-batches and ranks. The
weights carry the denominators of the whole update, so that accumulation, packing, sharing and the
number of ranks cannot change it (as they did in TRL PR#6024 and open-instruct#1728).
"""

from typing import Literal

import numpy as np
from numpy.typing import NDArray

from postgrad.core.ragged import Ragged

Aggregation = Literal["token", "sequence", "constant"]  # what a recipe can choose


def entry_weights(
    loss_mask: Ragged,
    rows: NDArray[np.int64],
    aggregation: Aggregation | Literal["pair"],
    constant_length: int | None = None,
) -> Ragged:
    """The weight of every token, float32, over the same tokens as `loss_mask`.

    Zero outside the sequences `rows` of the update and at tokens without loss. "token": 1 / loss
    tokens of the update. "sequence": 1 / (sequences * loss tokens of this sequence); a sequence
    without loss tokens is not counted. Both sum to 1. "constant": 1 / (sequences *
    constant_length), where a missing `constant_length` is a ValueError. "pair": 1 / (pairs * loss
    tokens of this sequence), which sums to 1 over the chosen ones; a pair with a side without loss
    tokens is not counted, half a pair among `rows` is a ValueError.
    """
    lengths = loss_mask.sums()
    in_update = np.zeros(len(loss_mask), np.bool_)
    in_update[rows] = True
    counted = in_update & (lengths > 0)
    if aggregation == "pair":
        counted = _of_whole_pairs(in_update, counted)
    tokens, sequences = max(1.0, lengths[counted].sum()), max(1, int(counted.sum()))
    per_sequence = np.zeros(len(loss_mask), np.float64)
    if aggregation == "token":
        per_sequence[counted] = 1.0 / tokens
    elif aggregation == "sequence":
        per_sequence[counted] = 1.0 / (sequences * lengths[counted])
    elif aggregation == "pair":
        per_sequence[counted] = 2.0 / (sequences * lengths[counted])
    elif constant_length is None:
        raise ValueError("aggregation 'constant' needs constant_length, the tokens to divide by")
    else:
        per_sequence[counted] = 1.0 / (sequences * constant_length)
    weights = np.repeat(per_sequence, loss_mask.lengths) * loss_mask.values
    return loss_mask.like(weights.astype(np.float32))


def _of_whole_pairs(in_update: NDArray[np.bool_], counted: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """[S] True where both sides of the pair are counted: sequences 2k and 2k + 1."""
    if len(in_update) % 2 or np.any(in_update[0::2] != in_update[1::2]):
        raise ValueError("aggregation 'pair' needs sequences in twos, and both of a pair in `rows`")
    return np.repeat(counted[0::2] & counted[1::2], 2)
