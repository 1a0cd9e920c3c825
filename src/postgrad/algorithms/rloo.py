"""RLOO: REINFORCE with a leave-one-out baseline (Ahmadian et al. 2024, arXiv:2402.14740)."""

from typing import Literal

import numpy as np
from numpy.typing import NDArray

from postgrad.algorithms.policy_gradient import PolicyGradient
from postgrad.ops import kl
from postgrad.ops.advantages import left_one_out
from postgrad.ops.losses import Aggregation


class RLOO(PolicyGradient):
    """The baseline of a sample is the mean reward of its siblings.

    A response is one action, so its token losses are summed and divided by a constant only; KL,
    where there is any, is k1 in the reward: both as in the paper.
    """

    kl_in: Literal["loss", "reward"] = "reward"
    kl_estimator: kl.Estimator = "k1"
    aggregation: Aggregation = "constant"

    def advantages(
        self, rewards: NDArray[np.float64], group: NDArray[np.int64]
    ) -> NDArray[np.float64]:
        return left_one_out(rewards, group)
