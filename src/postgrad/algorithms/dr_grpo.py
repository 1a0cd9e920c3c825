"""Dr. GRPO: GRPO without its two biases (Liu et al. 2025, arXiv:2503.20783)."""

import numpy as np
from numpy.typing import NDArray

from postgrad.algorithms.policy_gradient import PolicyGradient
from postgrad.ops.advantages import centred
from postgrad.ops.losses import Aggregation


class DrGRPO(PolicyGradient):
    """No division by the group's standard deviation, which favours questions that are too easy or
    too hard, and none by the response's own length, which favours long wrong answers: the loss is
    summed over tokens and divided by a constant.
    """

    aggregation: Aggregation = "constant"

    def advantages(
        self, rewards: NDArray[np.float64], group: NDArray[np.int64]
    ) -> NDArray[np.float64]:
        return centred(rewards, group)
