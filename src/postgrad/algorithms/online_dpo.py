"""Online DPO (Guo et al. 2024, arXiv:2402.04792): DPO on pairs of the policy's own samples."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
from pydantic import Field

from postgrad.algorithms.base import Credit, Needs, RolloutAlgorithm
from postgrad.algorithms.dpo import DPO
from postgrad.core.ragged import Ragged
from postgrad.core.rollout_batch import RolloutBatch
from postgrad.ops.advantages import best_and_worst, group_stds


class OnlineDPO(RolloutAlgorithm, DPO):
    """Of the samples of a prompt the one with the highest reward is chosen and the one with the
    lowest rejected, the first of equals. The others are not trained on.

    A pair whose rewards differ by no more than `margin` has no gradient. It is counted in the
    denominator, as a zero-variance group is. Rewards decide who is chosen, and nothing else.
    """

    min_group_size: ClassVar[int] = 2

    margin: float = Field(0.0, ge=0.0)  # units of reward

    def needs(self) -> Needs:
        return Needs(reference=True, ratio=False)

    def trained_samples(self, sampled: int, of_prompt: int) -> int:
        return 2 * sampled // of_prompt

    def credit(
        self,
        batch: RolloutBatch,
        old: Ragged | None,
        ref: Ragged | None,
        values: Ragged | None,
        state: Mapping[str, Any],
        entropy: Ragged | None = None,
    ) -> Credit:
        """The pairs of a step, chosen first. Raises ValueError for rewards that are not finite and
        where the reference's logprobs are missing.
        """
        if not np.isfinite(batch.rewards).all():
            raise ValueError("a kept sample has a reward that is not finite")
        every = batch.sequences
        rows = best_and_worst(batch.rewards, every.group)
        pairs = every.take(rows)
        preferred = np.arange(len(rows)) % 2 == 0
        experience = self.experience(pairs, preferred, ref and ref.take(rows), None)
        apart = batch.rewards[rows[0::2]] - batch.rewards[rows[1::2]]
        differ = experience.has_gradient & np.repeat(apart > self.margin, 2)
        metrics = {"groups/dropped": float(len(np.unique(every.group)) - len(apart))}
        if len(apart):
            deviations = group_stds(batch.rewards, every.group)[rows[0::2]]
            metrics |= {
                "groups/equal_fraction": float((apart == 0).mean()),
                "groups/reward_std": float(deviations.mean()),
                "pairs/tied_fraction": float((apart <= self.margin).mean()),
                "pairs/reward_difference": float(apart.mean()),
            }
        return Credit(replace(experience, has_gradient=differ), rows, state, metrics)
