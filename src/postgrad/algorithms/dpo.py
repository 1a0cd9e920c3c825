"""DPO: direct preference optimisation (Rafailov et al. 2023, arXiv:2305.18290), and its variants:
of the loss of two rewards (`loss`), and of the reward (`divergence`, `length_normalised`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Self

from pydantic import Field, model_validator

from postgrad.algorithms.preference import PairPreference
from postgrad.ops.preferences import (
    OF_DIFFERENCES,
    SMOOTHED,
    AnswerSums,
    Divergence,
    PairLoss,
    divergence_score,
    pair_loss,
)

if TYPE_CHECKING:
    from torch import Tensor


class DPO(PairPreference):
    """The reward of an answer is beta * log(policy / reference): a reward model inside the policy.

    `loss` is one of `pair_loss`, or several with their weights: {sigmoid = 0.8, bco = 0.2}. With
    "sigmoid" and `label_smoothing` it is conservative DPO, whose margin has an optimum. Another
    `divergence` replaces log(policy / reference) by its f' (Wang et al. 2023, arXiv:2309.16240).
    """

    beta: float = Field(0.1, gt=0.0)
    loss: PairLoss | dict[PairLoss, float] = "sigmoid"
    label_smoothing: float = Field(0.0, ge=0.0, lt=0.5)
    discopop_tau: float = Field(0.05, gt=0.0)  # of the loss "discopop"
    divergence: Divergence = "reverse_kl"
    divergence_alpha: float | None = Field(None, gt=0.0, lt=1.0)  # of the divergence "alpha"
    length_normalised: bool = False  # log-ratios are means over an answer's tokens, not sums

    @property
    def losses(self) -> dict[PairLoss, float]:
        """The losses that are added, with their weights."""
        return self.loss if isinstance(self.loss, dict) else {self.loss: 1.0}

    @model_validator(mode="after")
    def _settings_belong_together(self) -> Self:
        kinds, other = self.losses.keys(), self.divergence != "reverse_kl"
        problems = {
            "loss: give at least one loss, each with a weight above 0":
                not kinds or min(self.losses.values()) <= 0,
            f"label_smoothing is read by {', '.join(SMOOTHED)} alone: leave it out":
                self.label_smoothing > 0 and not kinds & set(SMOOTHED),
            'the loss "exo" is infinite without label_smoothing: set it, the paper has 0.001':
                "exo" in kinds and self.label_smoothing == 0,
            'discopop_tau is read by the loss "discopop" alone: leave it out':
                self.discopop_tau != 0.05 and "discopop" not in kinds,
            'divergence_alpha is the alpha of divergence = "alpha": set both, or neither':
                (self.divergence == "alpha") != (self.divergence_alpha is not None),
            "another divergence than reverse_kl needs a loss of the difference of two rewards: "
            f"{', '.join(OF_DIFFERENCES)}": other and not kinds <= set(OF_DIFFERENCES),
            'length_normalised is of divergence = "reverse_kl" alone: leave one of them out':
                other and self.length_normalised,
        }  # fmt: skip
        if present := [problem for problem, there in problems.items() if there]:
            raise ValueError(present[0])
        return self

    def reward(self, answers: AnswerSums) -> Tensor:
        log_ratio = answers.log_ratio
        if self.length_normalised:
            log_ratio = log_ratio / answers.tokens
        return self.beta * divergence_score(log_ratio, self.divergence, self.divergence_alpha)

    def pair_loss(self, chosen: Tensor, rejected: Tensor) -> Tensor:
        rest = self.beta, self.label_smoothing, self.discopop_tau
        terms = (w * pair_loss(kind, chosen, rejected, *rest) for kind, w in self.losses.items())
        return sum(terms, start=chosen.new_zeros(()))
