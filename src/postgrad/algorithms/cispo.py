"""CISPO: clipped importance weights, no clipped gradients (MiniMax-M1, arXiv:2506.13585)."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from pydantic import Field, field_validator

from postgrad.algorithms.base import LossInputs
from postgrad.algorithms.grpo import GRPO
from postgrad.ops import losses
from postgrad.ops.losses import Aggregation

if TYPE_CHECKING:
    from torch import Tensor


class CISPO(GRPO):
    """REINFORCE on every token, weighted by a ratio that is bounded from above and has no gradient.

    PPO's clip drops the gradient of tokens whose ratio has moved far, often the rare ones that
    begin a new line of thought. There is no dual clip, and no lower bound unless `clip_low` is
    below 1.
    """

    unread: ClassVar[tuple[str, ...]] = ("clip_by",)

    clip_low: float = Field(1.0, ge=0.0, le=1.0)  # 1: no bound, as no ratio is below 0
    clip_high: float = Field(0.28, ge=0.0)
    aggregation: Aggregation = "token"

    @field_validator("dual_clip")
    @classmethod
    def _no_dual_clip(cls, dual_clip: float | None) -> float | None:
        if dual_clip is not None:
            raise ValueError(
                "CISPO bounds the ratio itself: there is nothing for dual_clip to do, leave it out"
            )
        return dual_clip

    def surrogate(self, inputs: LossInputs, ratio: Tensor) -> Tensor:
        advantages = inputs.columns["advantages"]
        return losses.cispo(ratio, inputs.logprobs, advantages, self.clip_low, self.clip_high)
