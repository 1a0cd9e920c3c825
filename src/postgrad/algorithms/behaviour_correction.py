"""Corrects for a sampler that differs from the policy before the step: by engine or weights."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal, Self, cast, get_args

import numpy as np
from pydantic import Field, field_validator, model_validator

from postgrad.algorithms.base import LossInputs, RolloutAlgorithm
from postgrad.core.ragged import Ragged
from postgrad.ops import kl, losses
from postgrad.ops.losses import (
    CORRECTION_BOUNDS,
    Correction,
    Distance,
    Ratio,
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
    stays in every denominator. With old_logprobs = "sampled" logp_old is the sampler's, and the
    policy in the update takes its place in w.

    `correction_level` "sequence": w is the product over the loss tokens of a sample, the same for
    each of them, without the bias of single tokens' weights and with the variance of a product
    (Liu, Li et al. 2025, "When speed kills stability").

    `rejection` drops tokens, or whole responses, beside any correction: where a statistic of w lies
    outside its bounds (ops/losses.py, `within`). With several statistics all have to lie inside.

    `off_policy_threshold` drops responses with A < 0 from which the policy has moved away: where
    the mean of logp_sampled - logp over their tokens, with the policy as it is in the update, is
    above it (DeepSeek-V3.2, arXiv:2512.02556).

    In a step of one update with dropout all of them read the column "undropped_logprobs" for the
    policy: what its masks drop is no distance from the sampler.
    """

    correction: Correction = "off"
    correction_level: Literal["token", "sequence"] = "token"  # what w is of: "tis", "icepop"
    correction_low: float | None = Field(None, ge=0.0)  # of w; None: the method's default
    correction_high: float | None = Field(None, gt=0.0)
    # Divide the weights of "tis" and "icepop" by their mean over the step: of its tokens, or at
    # the level "sequence" of its responses. It takes a pass for the logprobs before the step.
    correction_normalised: bool = False
    # Of the ratio that is clipped: "policy", before the step; "sampled", as the sampler drew. With
    # samples of older weights the second clips how far the policy has moved since.
    old_logprobs: Literal["policy", "sampled"] = "policy"
    # Statistic of w -> what is kept: [low, high] of "token", "any_token", "geometric_mean",
    # "product"; the most of "mean_k2", "mean_k3", "sum_k2", "sum_k3" (nats), "mean_error".
    rejection: Mapping[Ratio | Distance, float | tuple[float, float]] = {}
    off_policy_threshold: float | None = Field(None, gt=0.0)  # nats per token; None: off
    correction_with_filters: bool = False  # allow it with top-p, top-k, min-p, which bias w

    @model_validator(mode="after")
    def _bounds_belong_to_a_correction(self) -> Self:
        if self.correction in ("off", "metrics"):
            for name in ("correction_low", "correction_high"):
                if getattr(self, name) is not None:
                    raise ValueError(
                        f"{name} bounds the weights of a correction, and correction = "
                        f'"{self.correction}" has none: leave it out, or choose one, such as "tis"'
                    )
        elif self.bounds[0] >= self.bounds[1]:
            low, high = self.bounds
            raise ValueError(
                f"correction_low = {low:g} is not below correction_high = {high:g}: no weight "
                "could lie between them, lower the first or raise the second"
            )
        if self.correction_level == "sequence" and self.correction not in ("tis", "icepop"):
            raise ValueError(
                'correction_level = "sequence" is of correction = "tis" and "icepop", which weigh '
                f'the policy loss: use one of them in place of "{self.correction}", or leave the '
                "level out"
            )
        if self.correction_normalised and self.correction not in ("tis", "icepop"):
            raise ValueError(
                'correction_normalised divides the weights of correction = "tis" and "icepop": use '
                f'one of them in place of "{self.correction}", or leave it out'
            )
        return self

    @field_validator("rejection", mode="before")
    @classmethod
    def _lists_are_pairs(cls, rejection: object) -> object:
        if not isinstance(rejection, Mapping):
            return rejection
        stated = cast("Mapping[object, object]", rejection)
        return {
            name: tuple(cast("list[object]", kept)) if isinstance(kept, list) else kept
            for name, kept in stated.items()
        }

    @model_validator(mode="after")
    def _rejections_are_in_range(self) -> Self:
        for name, kept in self.rejection.items():
            place = f"rejection.{name}"
            if isinstance(kept, tuple) != (name in get_args(Ratio)):
                wanted = "an upper bound, one number" if isinstance(kept, tuple) else "[low, high]"
                raise ValueError(f"{place} = {kept}: give {wanted}")
            low, high = kept if isinstance(kept, tuple) else (0.0, kept)
            least = 1.0 if name == "mean_error" else 0.0  # w = 1 everywhere gives this
            if not 0.0 <= low < high or high <= least:
                wanted = f"a bound above {least:g}"
                if isinstance(kept, tuple):
                    wanted = "[low, high] with 0 <= low < high"
                raise ValueError(
                    f"{place} = {kept}: nothing would be kept of any sample, give {wanted}"
                )
        return self

    @property
    def weighs(self) -> bool:
        """Whether `correction` changes the loss."""
        return self.correction not in ("off", "metrics")

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
        weight = inputs.token_weight
        before = inputs.logprobs.detach() if self.old_logprobs == "sampled" else old
        before = inputs.columns.get("undropped_logprobs", before)
        log_ratio = before - inputs.columns["sampled_logprobs"]
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
        if self.correction_normalised:
            factor = factor * inputs.columns["correction_scale"]
        if self.off_policy_threshold is not None:
            factor = factor * self._near(inputs, self.off_policy_threshold)
        metrics: dict[str, Tensor] = {}
        if self.rejection:
            kept = self._kept(log_ratio, sequence, n)
            factor = factor * kept
            metrics["correction/rejected_fraction"] = (weight * ~kept).sum()
        return factor, metrics | {
            "correction/ratio": (weight * importance).sum(),
            "correction/kl": (weight * kl.estimate("k3", -log_ratio)).sum(),  # the sampler's tokens
            "correction/factor": (weight * factor).sum(),
            "correction/factor_square": (weight * factor.square()).sum(),
            "correction/zeroed_fraction": (weight * (factor == 0)).sum(),
            "policy/bounded_exponents": (exponent.abs() > kl.MAX_EXPONENT).sum().to(weight.dtype),
        }

    def correction_scale(self, old: Ragged, sampled: Ragged, mask: Ragged) -> Ragged:
        """The column "correction_scale": one over the mean weight of the step, float32. old,
        sampled: logprobs; mask: bool, all over the step's tokens.
        """
        low, high = self.bounds
        mean = losses.mean_importance(
            old.like(old.values - sampled.values), mask, low, high,
            masked=self.correction == "icepop", by_sequence=self.correction_level == "sequence",
        )  # fmt: skip
        return mask.like((mask.values / mean).astype(np.float32))

    def _kept(self, log_ratio: Tensor, sequence: Tensor, n_sequences: int) -> Tensor:
        """[E] False where a statistic of `rejection` lies outside its bounds."""
        kept = log_ratio.new_ones(len(log_ratio)).bool()
        for name, bounds in self.rejection.items():
            low, high = bounds if isinstance(bounds, tuple) else (-math.inf, bounds)
            kept = kept & losses.within(name, log_ratio, sequence, n_sequences, low, high)
        return kept

    @staticmethod
    def _near(inputs: LossInputs, threshold: float) -> Tensor:
        """[E] False in responses that are dropped as too far from the policy."""
        now = inputs.columns.get("undropped_logprobs", inputs.logprobs.detach())
        away = inputs.columns["sampled_logprobs"] - now
        mean = losses.sequence_means(away, inputs.sequence, inputs.n_sequences)
        return (inputs.columns["advantages"] >= 0) | (mean <= threshold)
