"""IPO: identity preference optimisation (Azar et al. 2023, arXiv:2310.12036)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import Field

from postgrad.algorithms.preference import PairPreference
from postgrad.ops.preferences import AnswerSums

if TYPE_CHECKING:
    from torch import Tensor


class IPO(PairPreference):
    """(h - 1 / (2 beta))^2: the difference h of log-ratios is drawn to a fixed margin.

    Log-ratios are means over each answer's tokens, as its authors computed them; without
    `length_normalised` they are sums, as the paper writes them. The implicit reward is beta times
    that, so that the optimal margin of rewards is 1/2 whatever beta is.
    """

    beta: float = Field(0.1, gt=0.0)
    length_normalised: bool = True

    def reward(self, answers: AnswerSums) -> Tensor:
        tokens = answers.tokens if self.length_normalised else 1.0
        return self.beta * answers.log_ratio / tokens

    def pair_loss(self, chosen: Tensor, rejected: Tensor) -> Tensor:
        return ((chosen - rejected - 0.5) / self.beta).square()
