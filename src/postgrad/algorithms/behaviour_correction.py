"""Corrects for a sampler that differs from the policy before the step: by engine or weights."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Literal, Self

from pydantic import Field, model_validator

from postgrad.algorithms.base import LossInputs, RolloutAlgorithm
from postgrad.ops import kl, losses
from postgrad.ops.losses import (
    CORRECTION_BOUNDS,
    Correction,
    masked_importance,
    sequence_masked_importance,
    truncated_importance,
)

if TYPE_CHECKING:
    from torch import Tensor


class BehaviourCorrection(RolloutAlgorithm):
    """The policy loss of a token is multiplied by w = exp(logp_old - logp_sampled), bounded.

    "tis" truncates w to a range (Yao et al. 2025, "Your efficient RL framework secretly brings you
    off-policy RL training"); "icepop" drops tokens whose w lies outside a range (Ling team 2025,
    arXiv:2510.18855); "sequence_mask" drops sequences whose geometric mean of w does; "metrics"
    changes no loss and only measures w. KL and entropy are not multiplied, and what is dropped
    stays in every denominator.

    `correction_level` "sequence": w is the product over the loss tokens of a sample, the same for
    each of them, without the bias of single tokens' weights and with the variance of a product
    (Liu, Li et al. 2025, "When speed kills stability").

    `off_policy_threshold` drops responses with A < 0 from which the policy has moved away: where
    the mean of logp_sampled - logp over their tokens, with the policy as it is in the update, is
    above it (DeepSeek-V3.2, arXiv:2512.02556).
    """

    correction: Correction = "off"
    correction_level: Literal["token", "sequence"] = "token"  # what w is of: "tis", "icepop"
    correction_low: float | None = Field(None, ge=0.0)  # of w; None: the method's default
    correction_high: float | None = Field(None, gt=0.0)
    off_policy_threshold: float | None = Field(None, gt=0.0)  # nats per token; None: off
    correction_with_filters: bool = False  # allow it with top-p, top-k, min-p, which bias w

    @model_validator(mode="after")
    def _bounds_belong_to_a_correction(self) -> Self:
        if self.correction in ("off", "metrics"):
            for name in ("correction_low", "correction_high"):
                if getattr(self, name) is not None:
                    raise ValueError(f"{name} bounds a correction, and correction is off")
        elif self.bounds[0] >= self.bounds[1]:
            raise ValueError(f"correction_low {self.bounds[0]} is not below correction_high")
        if self.correction_level == "sequence" and self.correction not in ("tis", "icepop"):
            raise ValueError(
                'correction_level = "sequence" is of correction = "tis" and "icepop", which weigh '
                "the policy loss"
            )
        return self

    @property
    def bounds(self) -> tuple[float, float]:
        """(low, high) of the importance weights: the method's own where the recipe has none."""
        low, high = CORRECTION_BOUNDS.get(self.correction, (0.0, math.inf))
        return (
            low if self.correction_low is None else self.correction_low,
            high if self.correction_high is None else self.correction_high,
        )

    def correction_factor(
        self, inputs: LossInputs, old: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Factors [E] of the policy loss of each token, and metrics of how far sampler and learner
        are apart: "correction/kl" is KL(sampler || learner), the mean of w - 1 - log w. And how
        many of the exponents of w were bounded.
        """
        log_ratio, weight = old - inputs.columns["sampled_logprobs"], inputs.token_weight
        low, high = self.bounds
        importance = losses.bounded_exp(log_ratio)
        sequence, n = inputs.sequence, inputs.n_sequences
        exponent = log_ratio
        if self.correction_level == "sequence":
            exponent = losses.sequence_sums(log_ratio, sequence, n).index_select(0, sequence)
        if self.correction == "tis":
            factor = truncated_importance(exponent, low, high)
        elif self.correction == "icepop":
            factor = masked_importance(exponent, low, high)
        elif self.correction == "sequence_mask":
            factor = sequence_masked_importance(log_ratio, sequence, n, low, high)
        else:
            factor = importance.new_ones(len(importance))
        if self.off_policy_threshold is not None:
            factor = factor * self._near(inputs, self.off_policy_threshold)
        return factor, {
            "correction/ratio": (weight * importance).sum(),
            "correction/kl": (weight * kl.estimate("k3", -log_ratio)).sum(),  # the sampler's tokens
            "correction/factor": (weight * factor).sum(),
            "correction/zeroed_fraction": (weight * (factor == 0)).sum(),
            "policy/bounded_exponents": (exponent.abs() > kl.MAX_EXPONENT).sum().to(weight.dtype),
        }

    @staticmethod
    def _near(inputs: LossInputs, threshold: float) -> Tensor:
        """[E] False in responses that are dropped as too far from the policy."""
        away = inputs.columns["sampled_logprobs"] - inputs.logprobs.detach()
        mean = losses.sequence_means(away, inputs.sequence, inputs.n_sequences)
        return (inputs.columns["advantages"] >= 0) | (mean <= threshold)
