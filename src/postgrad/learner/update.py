"""An update: the samples of one optimizer step, with the denominators of the whole of it."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from postgrad.core import seeds
from postgrad.core.records import Experience


@dataclass(frozen=True, slots=True)
class Update:
    """Sequences `rows` of `experience`, trained on in one optimizer step.

    Its denominators count all of `rows`, also those without gradient, whatever micro-batches and
    ranks they are cut into.
    """

    experience: Experience
    rows: NDArray[np.int64]

    @property
    def rows_with_gradient(self) -> NDArray[np.int64]:
        """The rows that have to be computed."""
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

    Where samples have fallen away those that are left are spread evenly: a remainder would push as
    hard as a whole update. Fewer updates are made where they would have less than half of
    `train_batch_size`. whole_groups: samples of a group are in one update, so that sizes are only
    as even as groups allow; else sizes differ by one sample at most.

    With one update a pass the order does not matter and is kept. Otherwise groups are shuffled
    (drawn from seed, step and epoch) and lie together, so that their prompt is computed once. All
    of it follows from the arguments: a step that is done again is cut in the same way.
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
    """Where to cut: [0, ..., n] with at most `most` parts, as even as can be.

    ends: the places where a cut may be, ascending, the last of them n. least: what the smallest
    part has, unless there is only one.
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
