"""OPO: on-policy RL with the optimal baseline (Hao et al. 2025, arXiv:2505.23585)."""

import numpy as np
from numpy.typing import NDArray

from postgrad.algorithms.base import CreditInputs
from postgrad.algorithms.policy_gradient import PolicyGradient
from postgrad.ops.advantages import centred, weighted_centred
from postgrad.ops.losses import Aggregation


class OPO(PolicyGradient):
    """The baseline is the group's mean reward, weighted by the lengths of the responses.

    It is the one of least variance if the squared norm of a response's gradient grows with its
    number of tokens. There is no division by a standard deviation.
    """

    aggregation: Aggregation = "token"

    def advantages(
        self, rewards: NDArray[np.float64], group: NDArray[np.int64]
    ) -> NDArray[np.float64]:
        return centred(rewards, group)  # of responses of one length

    def token_advantages(self, inputs: CreditInputs) -> NDArray[np.float64]:
        sequences, rewards = inputs.sequences, inputs.rewards - inputs.charges.sums()
        lengths = np.maximum(inputs.written.sums(), 1).astype(np.float64)
        each = weighted_centred(rewards, lengths, sequences.group)
        return sequences.loss_mask.spread(each).values
