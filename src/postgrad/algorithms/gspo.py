"""GSPO: group sequence policy optimisation (Zheng et al. 2025, arXiv:2507.18071)."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from postgrad.algorithms.base import LossInputs, LossLevel
from postgrad.algorithms.grpo import GRPO
from postgrad.ops import losses

if TYPE_CHECKING:
    from torch import Tensor


class GSPO(GRPO):
    """The ratio is the sequence's: the geometric mean of its tokens' ratios, clipped as one.

    A response is kept or clipped whole. Its ratio stays far nearer to 1 than a token's, so the clip
    range is a thousandth of PPO's. `by_token` (GSPO-token) keeps the value of the ratio and gives
    each token the gradient of its own logprob, so that advantages may differ within a response;
    where they do not, the gradient is the same.
    """

    level: ClassVar[LossLevel] = "sequence"
    unread: ClassVar[tuple[str, ...]] = ("clip_by",)

    clip_low: float = Field(3e-4, ge=0.0, le=1.0)
    clip_high: float = Field(4e-4, ge=0.0)
    by_token: bool = False

    def ratio(self, inputs: LossInputs, old: Tensor) -> Tensor:
        means = losses.sequence_means(inputs.logprobs - old, inputs.sequence, inputs.n_sequences)
        if self.by_token:
            means = means.detach() + inputs.logprobs - inputs.logprobs.detach()
        return losses.bounded_exp(means)
