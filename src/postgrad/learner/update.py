"""An update: the samples of one optimizer step, over which its denominators count; how a step's
experience is cut into updates; and the columns of an update on the device, by token.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import TypedDict

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from postgrad.core import seeds
from postgrad.core.ragged import Ragged
from postgrad.core.records import Experience
from postgrad.layout.layout import Layout
from postgrad.models.attention import to_device


@dataclass(frozen=True, slots=True)
class Update:
    """Sequences `rows` of `experience`, trained on in one optimizer step.

    Denominators count all of `rows`, also those without gradient, however they are cut into
    micro-batches and divided over ranks.
    """

    experience: Experience
    rows: NDArray[np.int64]  # [sequences of this update] indices into the experience

    @property
    def rows_with_gradient(self) -> NDArray[np.int64]:
        """The part of `rows` that can move a weight: only these are computed."""
        return self.rows[self.experience.has_gradient[self.rows]]

    @property
    def loss_tokens(self) -> int:
        """Loss-bearing tokens of all rows."""
        return int(self.experience.sequences.loss_mask.sums()[self.rows].sum())


def updates(
    experience: Experience,
    train_batch_size: int,
    per_pass: int,
    epochs: int,
    seed: int,
    step: int,
    *,
    whole_groups: bool = False,
) -> Iterator[Update]:
    """The updates of a step: `epochs` passes over the experience, `per_pass` updates each.

    Where samples were dropped, the rest is divided evenly: a small remainder would move the weights
    as far as a full update. There are fewer updates where each would get less than half of
    `train_batch_size` samples. whole_groups: all samples of a group are in the same update, and
    sizes as even as that allows; else sizes differ by at most one sample.

    With one update a pass the order is kept. Otherwise groups are shuffled (drawn from seed, step
    and epoch) and stay together, so that their prompt is computed once. All of it follows from the
    arguments: a step that is repeated after a resume is cut in the same way.
    """
    groups = experience.sequences.group
    _, place = np.unique(groups, return_inverse=True)
    for epoch in range(epochs if len(experience) else 0):
        order = np.arange(len(experience))
        if per_pass > 1:
            rank = seeds.permutation(int(place.max()) + 1, seed, "updates", step, epoch)
            order = np.argsort(rank[place], kind="stable")
        ends = np.arange(1, len(order) + 1)
        if whole_groups:
            ends = ends[np.diff(place[order], append=-1) != 0]
        cuts = even_cuts(ends, per_pass, -(-train_batch_size // 2))
        for start, end in pairwise(cuts):
            yield Update(experience, order[start:end])


def even_cuts(ends: NDArray[np.int64], most: int, least: int) -> list[int]:
    """Cut points [0, ..., n] of at most `most` parts, as even as possible.

    ends: the places where a cut may be, ascending, the last of them n. least: size of the smallest
    part, unless there is only one part.
    """
    n = int(ends[-1])
    for parts in range(min(most, len(ends)), 1, -1):
        wanted = n * np.arange(1, parts)  # times `parts`: whole numbers have no rounding
        after = np.searchsorted(ends * parts, wanted)
        before = np.maximum(after - 1, 0)
        nearer = wanted - ends[before] * parts <= ends[after] * parts - wanted
        cuts = [0, *ends[np.where(nearer, before, after)].tolist(), n]
        if min(b - a for a, b in pairwise(cuts)) >= least:
            return cuts
    return [0, n]


class Entries(TypedDict):
    """The fields that LossInputs and ScoreInputs have in common; see there."""

    columns: Mapping[str, Tensor]
    sequence: Tensor
    n_sequences: int
    weight: Tensor
    token_weight: Tensor


class FlatColumns:
    """An update's columns and loss weights on the device, by flat token number. weights: what every
    token counts for in the loss of the update.
    """

    def __init__(self, update: Update, weights: Ragged, device: torch.device) -> None:
        experience = update.experience
        self._device = device
        self._columns = {
            name: to_device(column.values.astype(np.float32), device)
            for name, column in experience.columns.items()
        }
        self._weight = to_device(weights.values, device)
        lengths = experience.sequences.loss_mask.sums()
        # Means over the computed tokens: skipping does not dilute metrics.
        tokens = max(1.0, float(lengths[update.rows_with_gradient].sum()))
        self._token_weight = to_device(np.array([1.0 / tokens], np.float32), device)

    def at(self, layout: Layout) -> Entries:
        """The columns at a layout's entries, as LossInputs and ScoreInputs want them."""
        column = to_device(layout.column, self._device)
        at_entries = {name: flat.index_select(0, column) for name, flat in self._columns.items()}
        return {
            "columns": at_entries,
            "sequence": to_device(layout.sequence, self._device),
            "n_sequences": layout.n_sequences,
            "weight": self._weight.index_select(0, column),
            "token_weight": self._token_weight.expand(len(column)),
        }
