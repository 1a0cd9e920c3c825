"""AOT: alignment via optimal transport (Melnyk et al. 2024, arXiv:2406.05882)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from postgrad.algorithms.base import LossInputs, Needs
from postgrad.algorithms.preference import PairPreference, mean_of
from postgrad.ops.preferences import AnswerSums, logistic

if TYPE_CHECKING:
    from torch import Tensor

    from postgrad.core.ragged import Ragged
    from postgrad.core.records import Experience


class AOT(PairPreference):
    """The distribution of one side's log-ratios over an update is to lie above the other's: both
    are sorted, and the smallest is compared with the smallest, and so on.

    paired: the two are the policy's and the reference's differences log p(chosen) - log p(rejected)
    of each pair. Else they are the chosen and the rejected answers' log(policy / reference).
    """

    beta: float = Field(0.1, gt=0.0)
    label_smoothing: float = Field(0.0, ge=0.0, lt=0.5)
    paired: bool = True

    def needs(self) -> Needs:
        return replace(super().needs(), own_temperatures=(1.0,))

    def reward(self, answers: AnswerSums) -> Tensor:
        return self.beta * answers.log_ratio

    def pair_loss(self, chosen: Tensor, rejected: Tensor) -> Tensor:
        return logistic(chosen - rejected, self.label_smoothing)

    def with_own(self, experience: Experience, before: Sequence[Ragged]) -> Experience:
        """Adds what each answer's log-ratio is compared with, less that of its own pair."""
        mask = experience.sequences.loss_mask
        policy, ref = (
            mask.like(np.where(mask.values, column.values.astype(np.float64), 0.0)).sums()
            for column in (before[0], experience.columns["ref_logprobs"])
        )
        shift, counted = np.zeros(len(mask)), experience.has_gradient[0::2]
        good, bad = (np.flatnonzero(np.repeat(counted, 2))[side::2] for side in (0, 1))
        if self.paired:
            of_ref = ref[good] - ref[bad]
            shift[good] = of_ref - matched(policy[good] - policy[bad], of_ref)
        else:
            ratio = policy - ref
            shift[good] = ratio[bad] - matched(ratio[good], ratio[bad])
            shift[bad] = matched(ratio[bad], ratio[good]) - ratio[good]
        column = mask.spread(shift).values.astype(np.float32)
        return replace(experience, columns={**experience.columns, "shift": mask.like(column)})

    def pair_losses(self, inputs: LossInputs, chosen: Tensor, rejected: Tensor) -> Tensor:
        shift = self.beta * mean_of(inputs, "shift")
        if self.paired:
            return self.pair_loss(chosen + shift[0::2], rejected)
        # Each answer is compared with a constant, so every comparison is there twice.
        first = self.pair_loss(chosen + shift[0::2], rejected.detach())
        second = self.pair_loss(chosen.detach() + shift[1::2], rejected)
        return first + second - (first + second).detach() / 2


def matched(values: NDArray[np.float64], others: NDArray[np.float64]) -> NDArray[np.float64]:
    """[n] for each value the one of `others` that has its place when both are sorted."""
    partners = np.empty(len(values))
    partners[np.argsort(values, kind="stable")] = np.sort(others)
    return partners
