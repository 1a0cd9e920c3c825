"""SimPO: simple preference optimisation (Meng et al. 2024, arXiv:2405.14734)."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from postgrad.algorithms.preference import PairPreference
from postgrad.ops.preferences import AnswerSums, logistic

if TYPE_CHECKING:
    from torch import Tensor


class SimPO(PairPreference):
    """The reward of an answer is beta times the mean logprob of its tokens, by which decoding ranks
    answers too; the target margin is `gamma`. There is no reference.
    """

    with_reference: ClassVar[bool] = False

    beta: float = Field(2.0, gt=0.0)
    gamma: float = Field(1.0, ge=0.0)
    label_smoothing: float = Field(0.0, ge=0.0, lt=0.5)

    def reward(self, answers: AnswerSums) -> Tensor:
        return self.beta * answers.logprob / answers.tokens

    def pair_loss(self, chosen: Tensor, rejected: Tensor) -> Tensor:
        return logistic(chosen - rejected - self.gamma, self.label_smoothing)
