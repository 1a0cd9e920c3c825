"""ReMax: the reward of the greedy answer as the baseline (Li et al. 2023, arXiv:2310.10505)."""

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from postgrad.algorithms.base import CreditInputs, Needs
from postgrad.algorithms.policy_gradient import PolicyGradient
from postgrad.ops.losses import Aggregation


class ReMax(PolicyGradient):
    """A sample's advantage is by how much it is better than the greedy answer to its prompt.

    Sample 0 of each prompt is drawn at temperature 0 and scored as the others; it is not trained
    on. A prompt whose greedy answer has no score is dropped.
    """

    aggregation: Aggregation = "token"

    def needs(self) -> Needs:
        return replace(super().needs(), greedy=True)

    def trained_samples(self, sampled: int, of_prompt: int) -> int:
        return sampled - sampled // of_prompt

    def advantages(
        self, rewards: NDArray[np.float64], group: NDArray[np.int64]
    ) -> NDArray[np.float64]:
        """As where the first sample of each group is the greedy one."""
        _, first, place = np.unique(group, return_index=True, return_inverse=True)
        return rewards - rewards[first][place]

    def token_advantages(self, inputs: CreditInputs) -> NDArray[np.float64]:
        sequences, greedy = inputs.sequences, inputs.greedy
        charges = np.where(greedy, 0.0, inputs.charges.sums())  # the baseline is a reward alone
        order = np.argsort(~greedy, kind="stable")  # greedy ones first
        each = np.empty(len(greedy))
        each[order] = self.advantages((inputs.rewards - charges)[order], sequences.group[order])
        return sequences.loss_mask.spread(each).values
