"""CPO: contrastive preference optimisation (Xu et al. 2024, arXiv:2401.08417)."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from postgrad.algorithms.preference import PairPreference
from postgrad.ops.preferences import AnswerSums, logistic

if TYPE_CHECKING:
    from torch import Tensor


class CPO(PairPreference):
    """DPO with a uniform reference, and SFT on the chosen answer, which keeps it likely.

    The reward of an answer is beta times the sum of its logprobs: there is no second model.
    """

    with_reference: ClassVar[bool] = False

    beta: float = Field(0.1, gt=0.0)
    label_smoothing: float = Field(0.0, ge=0.0, lt=0.5)
    nll_coef: float = Field(1.0, ge=0.0)

    def reward(self, answers: AnswerSums) -> Tensor:
        return self.beta * answers.logprob

    def pair_loss(self, chosen: Tensor, rejected: Tensor) -> Tensor:
        return logistic(chosen - rejected, self.label_smoothing)
