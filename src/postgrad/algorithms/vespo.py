"""VESPO: a smooth weight of whole responses in place of the clip (arXiv:2602.10693)."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from postgrad.algorithms.base import LossInputs, LossLevel
from postgrad.algorithms.grpo import GRPO
from postgrad.ops import losses
from postgrad.ops.losses import Aggregation

if TYPE_CHECKING:
    from torch import Tensor


LEAST = -18.420680743952367  # log 1e-8: of a response's ratio, as its authors bound it


class VESPO(GRPO):
    """REINFORCE on every token, weighted by w^k exp(rate (1 - w)) of its response's ratio w, which
    has no gradient there. The weight is 1 at w = 1, largest at w = k / rate, and falls to 0 for
    responses that are far less or far more likely than when they were sampled.

    w is the ratio of the whole response, a product over its tokens.
    """

    level: ClassVar[LossLevel] = "sequence"
    unread: ClassVar[tuple[str, ...]] = ("clip_low", "clip_high", "clip_by", "dual_clip")

    shape_positive: float = Field(2.0, gt=0.0)  # k where A >= 0
    rate_positive: float = Field(3.0, gt=0.0)
    shape_negative: float = Field(3.0, gt=0.0)
    rate_negative: float = Field(2.0, gt=0.0)
    aggregation: Aggregation = "token"

    def ratio(self, inputs: LossInputs, old: Tensor) -> Tensor:
        change = (inputs.logprobs - old).clamp(-losses.MAX_EXPONENT, losses.MAX_EXPONENT)
        sums = losses.sequence_sums(change, inputs.sequence, inputs.n_sequences)
        return losses.bounded_exp(sums.clamp(min=LEAST)).index_select(0, inputs.sequence)

    def surrogate(self, inputs: LossInputs, ratio: Tensor) -> Tensor:
        advantages = inputs.columns["advantages"]
        good = advantages >= 0
        shape, rate = (
            advantages.new_full((), of_good).where(good, of_bad)
            for of_good, of_bad in (
                (self.shape_positive, self.shape_negative),
                (self.rate_positive, self.rate_negative),
            )
        )
        weight = losses.gamma_weight(ratio.detach().log(), shape, rate)
        return -advantages * weight * inputs.logprobs
