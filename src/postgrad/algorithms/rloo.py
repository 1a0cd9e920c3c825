"""RLOO: REINFORCE with a leave-one-out baseline (Ahmadian et al. 2024, arXiv:2402.14740)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import model_validator

from postgrad.algorithms.base import LossInputs
from postgrad.algorithms.policy_gradient import PolicyGradient
from postgrad.ops import kl, losses
from postgrad.ops.advantages import left_one_out
from postgrad.ops.losses import Aggregation

if TYPE_CHECKING:
    from torch import Tensor


class RLOO(PolicyGradient):
    """The baseline of a sample is the mean reward of its siblings.

    A response is one action, so its token losses are summed and divided by a constant only; KL,
    where there is any, is k1 in the reward: both as in the paper. by_response: the ratio, too, is
    that of the response, the product of its tokens' ratios, and is clipped as one. Each token has
    the gradient of its own logprob, times that ratio.
    """

    kl_in: Literal["loss", "reward"] = "reward"
    kl_estimator: kl.Estimator = "k1"
    aggregation: Aggregation = "constant"
    by_response: bool = False

    @model_validator(mode="after")
    def _bounds_one_ratio(self) -> Self:
        if self.by_response and self.clip_by == "probability":
            raise ValueError(
                'by_response bounds the ratio of a response, clip_by = "probability" the '
                "probability of each token: leave one of them out"
            )
        return self

    def advantages(
        self, rewards: NDArray[np.float64], group: NDArray[np.int64]
    ) -> NDArray[np.float64]:
        return left_one_out(rewards, group)

    def ratio(self, inputs: LossInputs, old: Tensor) -> Tensor:
        if not self.by_response:
            return super().ratio(inputs, old)
        change = inputs.logprobs - old
        sums = losses.sequence_sums(change.detach(), inputs.sequence, inputs.n_sequences)
        of_response = sums.index_select(0, inputs.sequence)
        return losses.bounded_exp(of_response + change - change.detach())
