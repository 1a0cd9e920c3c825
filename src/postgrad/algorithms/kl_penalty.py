"""The KL to a reference: charged to rewards, with a coefficient that may adapt, or in the loss."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal, Self, cast

import numpy as np
from pydantic import Field, model_validator

from postgrad.algorithms.base import RolloutAlgorithm, required
from postgrad.core.ragged import Ragged
from postgrad.ops import kl


class KLPenalty(RolloutAlgorithm):
    """KL in the reward: beta * (sum of the sequence's token KLs) is subtracted from its reward
    before advantages are computed. With `kl_target` beta is adapted so that the mean k1 per token
    stays near the target. KL in the loss: beta * KL of each token, with the policy loss's
    denominator.
    """

    unread: ClassVar[tuple[str, ...]] = ()  # inherited settings that the algorithm does not read

    kl_coef: float = Field(0.0, ge=0.0)
    kl_in: Literal["loss", "reward"] = "loss"
    kl_estimator: kl.Estimator = "k3"
    # Of a KL in the loss: multiply it by the token's ratio, gradient included, which makes its
    # gradient that of the KL also where samples are of older weights (DeepSeek-V3.2).
    kl_corrected: bool = False
    # A token's KL lies within +-this, and has no gradient beyond; None: k3 may grow as exp does.
    kl_max: float | None = Field(None, gt=0.0)
    kl_target: float | None = Field(None, gt=0.0)
    kl_horizon: int = Field(10_000, ge=1)  # samples

    @model_validator(mode="before")
    @classmethod
    def _k3_in_the_loss(cls, knobs: Any) -> Any:
        """A subclass may have k1 as its default, whose gradient is 0 on average: in the loss k3."""
        stated = cast("dict[str, Any]", knobs)
        if isinstance(knobs, dict) and stated.get("kl_in") == "loss":
            return {"kl_estimator": "k3", **stated}
        return stated

    @model_validator(mode="after")
    def _states_nothing_unread(self) -> Self:
        """Before the checks below, which would advise what the algorithm does not read. The target
        is of a KL in the reward.
        """
        for name in (*self.unread, *(("kl_target",) if "kl_in" in self.unread else ())):
            if getattr(self, name) != type(self).model_fields[name].default:
                raise ValueError(f"{name}: {type(self).__name__} does not read it, leave it out")
        return self

    @model_validator(mode="after")
    def _target_needs_reward(self) -> Self:
        if self.kl_target is not None and (self.kl_in != "reward" or self.kl_coef == 0.0):
            raise ValueError(
                'kl_target adapts a KL in the reward: set kl_in = "reward" and kl_coef > 0 too'
            )
        return self

    @model_validator(mode="after")
    def _corrected_needs_loss(self) -> Self:
        if self.kl_corrected and not (self.kl_coef > 0 and self.kl_in == "loss"):
            raise ValueError(
                'kl_corrected is of a KL in the loss: set kl_in = "loss" and kl_coef > 0 too'
            )
        return self

    def kl_charges(
        self, written: Ragged, loss_mask: Ragged, old: Ragged | None, ref: Ragged | None,
        state: Mapping[str, Any],
    ) -> tuple[Ragged, Mapping[str, Any], dict[str, float]]:  # fmt: skip
        """(beta * KL of each token that the policy wrote, the next state, metrics). Means are over
        the tokens of `loss_mask`.
        """
        beta = float(state.get("kl_coef", self.kl_coef))
        before, reference = (
            required(column, f"{name!r} logprobs").values
            for column, name in ((old, "old"), (ref, "ref"))
        )
        d = (before.astype(np.float64) - reference) * written.values
        token_kl = kl.estimate(self.kl_estimator, d)
        k1, tokens = float((d * loss_mask.values).sum()), loss_mask.sums()
        mean_k1 = k1 / max(1, int(tokens.sum()))
        metrics = {
            "kl/coefficient": beta,
            "kl/token_mean": mean_k1,
            "kl/sequence_mean": k1 / max(1, int((tokens > 0).sum())),
            "kl/bounded_exponents": float(kl.overflows(self.kl_estimator, d).sum()),
        }
        if self.kl_max is not None:
            token_kl, bounded = kl.bounded(token_kl, self.kl_max)
            share = (bounded & loss_mask.values).sum() / max(1, int(tokens.sum()))
            metrics["kl/bounded_fraction"] = float(share)
        charges = written.like(beta * token_kl)
        if self.kl_target is not None and tokens.any():
            beta_after = kl.adapted_coefficient(
                beta, mean_k1, target=self.kl_target, samples=len(written), horizon=self.kl_horizon
            )
            state = {**state, "kl_coef": beta_after}
        return charges, state, metrics
