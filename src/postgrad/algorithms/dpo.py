"""DPO: direct preference optimisation (Rafailov et al. 2023, arXiv:2305.18290)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import Field

from postgrad.algorithms.preference import PairPreference
from postgrad.ops.preferences import AnswerSums, logistic

if TYPE_CHECKING:
    from torch import Tensor


class DPO(PairPreference):
    """The reward of an answer is beta * log(policy / reference): a reward model inside the policy.

    With `label_smoothing` it is conservative DPO: each label is wrong with that chance, so that the
    margin has an optimum instead of growing for ever.
    """

    beta: float = Field(0.1, gt=0.0)
    label_smoothing: float = Field(0.0, ge=0.0, lt=0.5)

    def reward(self, answers: AnswerSums) -> Tensor:
        return self.beta * answers.log_ratio

    def pair_loss(self, margin: Tensor) -> Tensor:
        return logistic(margin, self.label_smoothing)
