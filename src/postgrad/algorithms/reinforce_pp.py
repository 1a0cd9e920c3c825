"""REINFORCE++: no critic, no group, a batch-wide normalisation (Hu 2025, arXiv:2501.03262)."""

from typing import ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from postgrad.algorithms.base import CreditInputs
from postgrad.algorithms.policy_gradient import PolicyGradient
from postgrad.ops import kl
from postgrad.ops.advantages import to_go, whitened
from postgrad.ops.losses import Aggregation


class ReinforcePP(PolicyGradient):
    """A token's advantage is all reward that follows it, whitened over the step's tokens.

    The sequence's reward is at its last token, a turn's reward at the turn's last token, and the KL
    of each token is charged at that token (k1, in the reward): a token's advantage counts later
    charges, not earlier ones. One sample a prompt is enough.
    """

    min_group_size: ClassVar[int] = 1

    kl_in: Literal["loss", "reward"] = "reward"
    kl_estimator: kl.Estimator = "k1"
    aggregation: Aggregation = "token"
    std_norm: bool = True  # False: of the whitening only the mean is taken, not the deviation

    def advantages(
        self, rewards: NDArray[np.float64], group: NDArray[np.int64]
    ) -> NDArray[np.float64]:
        return rewards

    def token_advantages(self, inputs: CreditInputs) -> NDArray[np.float64]:
        follows = to_go(inputs.rewards, inputs.charges, inputs.turn_rewards)
        return whitened(follows, inputs.sequences.loss_mask.values, std_norm=self.std_norm)
