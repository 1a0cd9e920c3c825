"""SAPO: soft adaptive policy optimisation (Gao et al. 2025, arXiv:2511.20347)."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from postgrad.algorithms.base import LossInputs
from postgrad.algorithms.grpo import GRPO
from postgrad.ops import losses

if TYPE_CHECKING:
    from torch import Tensor


class SAPO(GRPO):
    """GRPO with a soft gate in place of the clip: the further a token's ratio is from 1, the less
    gradient it has, and none is cut off.

    The gate closes sooner for bad responses: their gradient raises all tokens that were not
    sampled, of which there are many.
    """

    unread: ClassVar[tuple[str, ...]] = ("clip_low", "clip_high", "clip_by", "dual_clip")

    gate_positive: float = Field(1.0, gt=0.0)  # the gate's temperature where A > 0
    gate_negative: float = Field(1.05, gt=0.0)  # and elsewhere

    def surrogate(self, inputs: LossInputs, ratio: Tensor) -> Tensor:
        advantages = inputs.columns["advantages"]
        closing = advantages.new_full((), self.gate_negative)
        temperature = closing.where(advantages <= 0, self.gate_positive)
        return -advantages * losses.soft_gate(ratio, temperature)
