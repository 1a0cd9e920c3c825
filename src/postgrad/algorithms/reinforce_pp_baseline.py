"""REINFORCE++-baseline: group means, batch-wide deviation (Hu 2025, arXiv:2501.03262)."""

import numpy as np
from numpy.typing import NDArray

from postgrad.algorithms.base import CreditInputs
from postgrad.algorithms.policy_gradient import PolicyGradient
from postgrad.ops.advantages import centred, whitened
from postgrad.ops.losses import Aggregation


class ReinforcePPBaseline(PolicyGradient):
    """A sample's reward minus its group's mean, then whitened over all tokens of the step.

    Dividing by the step's deviation, not the group's, keeps a group of nearly equal rewards from
    weighing as much as one of very different ones. KL, where there is any, is in the loss.
    """

    aggregation: Aggregation = "token"
    std_norm: bool = True  # False: of the whitening only the mean is taken, not the deviation

    def advantages(
        self, rewards: NDArray[np.float64], group: NDArray[np.int64]
    ) -> NDArray[np.float64]:
        return centred(rewards, group)

    def token_advantages(self, inputs: CreditInputs) -> NDArray[np.float64]:
        each = super().token_advantages(inputs)
        return whitened(each, inputs.sequences.loss_mask.values, std_norm=self.std_norm)
