"""GMPO: geometric-mean policy optimisation (Zhao et al. 2025, arXiv:2507.20673)."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from postgrad.algorithms.base import LossInputs, LossLevel
from postgrad.algorithms.grpo import GRPO
from postgrad.ops import losses

if TYPE_CHECKING:
    from torch import Tensor


class GMPO(GRPO):
    """The ratio of a response is the geometric mean of its tokens' ratios, each clipped before.

    A single token of a far ratio hardly moves the mean, so that the clip range can be wide:
    clip_low and clip_high bound the logarithm of a token's ratio, exp(-0.4) to exp(0.4).
    """

    level: ClassVar[LossLevel] = "sequence"
    unread: ClassVar[tuple[str, ...]] = ("dual_clip", "clip_by")

    clip_low: float = Field(0.4, ge=0.0)
    clip_high: float = Field(0.4, ge=0.0)

    def ratio(self, inputs: LossInputs, old: Tensor) -> Tensor:
        change = losses.clipped_change(
            inputs.logprobs - old, inputs.columns["advantages"], self.clip_low, self.clip_high
        )
        means = losses.sequence_means(change, inputs.sequence, inputs.n_sequences)
        return losses.bounded_exp(means)

    def surrogate(self, inputs: LossInputs, ratio: Tensor) -> Tensor:
        return -inputs.columns["advantages"] * ratio

    def clipped(
        self, inputs: LossInputs, ratio: Tensor, old: Tensor
    ) -> tuple[Tensor, Tensor] | None:
        advantages, change = inputs.columns["advantages"], inputs.logprobs.detach() - old
        low, high = change < -self.clip_low, change > self.clip_high
        return low & (advantages < 0), high & (advantages > 0)
