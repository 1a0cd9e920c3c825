"""WPO: weighted preference optimisation (Zhou et al. 2024, arXiv:2406.11827)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from postgrad.algorithms.base import LossInputs, Needs
from postgrad.algorithms.dpo import DPO
from postgrad.algorithms.preference import mean_of

if TYPE_CHECKING:
    from torch import Tensor

    from postgrad.core.ragged import Ragged
    from postgrad.core.records import Experience


class WPO(DPO):
    """DPO whose pairs weigh as much as the policy is likely to write them: w = w(chosen) *
    w(rejected), at most 1, without gradient.

    w of an answer is the geometric mean over its tokens of p(token) / sum_v p(v)^2, which is 1 on
    average over samples of the policy ("sampled alignment"). With q the policy at temperature 1/2
    that is q(token) / p(token), so two forward passes give it.
    """

    def needs(self) -> Needs:
        return replace(super().needs(), own_temperatures=(1.0, 0.5))

    def with_own(self, experience: Experience, before: Sequence[Ragged]) -> Experience:
        warm, sharp = before
        mask = experience.sequences.loss_mask
        exponent = (sharp.values.astype(np.float64) - warm.values) * mask.values
        means = mask.like(exponent).sums() / np.maximum(mask.sums(), 1)
        weights = np.exp(np.minimum(means[0::2] + means[1::2], 0.0))
        column = mask.spread(np.repeat(weights, 2))
        columns = {**experience.columns, "pair_weight": mask.like(column.values.astype(np.float32))}
        return replace(experience, columns=columns)

    def pair_losses(self, inputs: LossInputs, chosen: Tensor, rejected: Tensor) -> Tensor:
        return mean_of(inputs, "pair_weight")[0::2] * self.pair_loss(chosen, rejected)
