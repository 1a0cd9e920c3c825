"""REINFORCE++: no critic, no group, a batch-wide normalisation (Hu 2025, arXiv:2501.03262)."""

from typing import ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from postgrad.algorithms.policy_gradient import PolicyGradient
from postgrad.core.ragged import Ragged
from postgrad.core.records import Sequences
from postgrad.ops import kl
from postgrad.ops.advantages import to_go, whitened
from postgrad.ops.weights import Aggregation


class ReinforcePP(PolicyGradient):
    """A token's advantage is all reward that follows it, whitened over the step's tokens.

    The sequence's reward stands at its last token and the KL of each token is charged where it
    arises (k1, in the reward), so early tokens answer for later ones. One sample a prompt
    is enough.
    """

    min_group_size: ClassVar[int] = 1

    kl_in: Literal["loss", "reward"] = "reward"
    kl_estimator: kl.Estimator = "k1"
    aggregation: Aggregation = "token"

    def advantages(
        self, rewards: NDArray[np.float64], group: NDArray[np.int64]
    ) -> NDArray[np.float64]:
        return rewards

    def token_advantages(
        self, rewards: NDArray[np.float64], sequences: Sequences, charges: Ragged
    ) -> NDArray[np.float64]:
        return whitened(to_go(rewards, charges), sequences.loss_mask.values)
