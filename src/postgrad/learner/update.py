"""An update: the samples of one optimizer step, with the denominators of the whole of it."""

from collections.abc import Iterator
from dataclasses import dataclass

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
    experience: Experience, train_batch_size: int, epochs: int, seed: int, step: int
) -> Iterator[Update]:
    """The updates of a step: `epochs` passes over the experience, `train_batch_size` samples each.

    With one update a pass the order does not matter and is kept. Otherwise groups are shuffled
    (drawn from seed, step and epoch) and stay together, so that their prompt is computed once. The
    last update of a pass takes what is left.
    """
    groups = experience.sequences.group
    for epoch in range(epochs):
        order = np.arange(len(experience))
        if train_batch_size < len(experience):
            _, place = np.unique(groups, return_inverse=True)
            rank = seeds.permutation(int(place.max()) + 1, seed, "updates", step, epoch)
            order = np.argsort(rank[place], kind="stable")
        for start in range(0, len(order), train_batch_size):
            yield Update(experience, order[start : start + train_batch_size])
