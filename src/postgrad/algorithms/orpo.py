"""ORPO: odds ratio preference optimisation (Hong et al. 2024, arXiv:2403.07691)."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from postgrad.algorithms.preference import PairPreference
from postgrad.ops.preferences import AnswerSums, log_odds, logistic

if TYPE_CHECKING:
    from torch import Tensor


class ORPO(PairPreference):
    """SFT on the chosen answer, plus a loss of the log odds ratio of the two answers.

    It needs no reference and no SFT before it. The reward of an answer is the log of its odds
    p / (1 - p), with p the geometric mean of its tokens' probabilities.
    """

    with_reference: ClassVar[bool] = False

    odds_coef: float = Field(0.1, ge=0.0)  # lambda in the paper, beta in TRL
    nll_coef: float = Field(1.0, ge=0.0)

    def reward(self, answers: AnswerSums) -> Tensor:
        return log_odds(answers.logprob / answers.tokens)

    def pair_loss(self, chosen: Tensor, rejected: Tensor) -> Tensor:
        return self.odds_coef * logistic(chosen - rejected)
