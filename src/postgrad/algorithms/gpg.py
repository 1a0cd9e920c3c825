"""GPG: group policy gradient (Chu et al. 2025, arXiv:2504.02546)."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import numpy as np
from numpy.typing import NDArray

from postgrad.algorithms.base import LossInputs
from postgrad.algorithms.policy_gradient import PolicyGradient
from postgrad.ops.advantages import centred, share_valid
from postgrad.ops.losses import Aggregation

if TYPE_CHECKING:
    from torch import Tensor


class GPG(PolicyGradient):
    """REINFORCE with the group's mean as baseline: no ratio, no clip, no standard deviation.

    Groups whose rewards are all equal have no gradient, and count in the denominator. Advantages
    are divided by the share of the other samples, as if only those were in the step.
    """

    unread: ClassVar[tuple[str, ...]] = ("clip_low", "clip_high", "clip_by", "dual_clip")

    aggregation: Aggregation = "token"

    def advantages(
        self, rewards: NDArray[np.float64], group: NDArray[np.int64]
    ) -> NDArray[np.float64]:
        return centred(rewards, group) / share_valid(rewards, group)

    def surrogate(self, inputs: LossInputs, ratio: Tensor) -> Tensor:
        return -inputs.columns["advantages"] * inputs.logprobs
