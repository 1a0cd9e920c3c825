"""Which tokens of a step bear the policy loss: all, those of high entropy, or all but those whose
gradient makes entropy collapse, or on which the policy has moved far from the sampler. And a bonus
for entropy.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

from postgrad.algorithms.base import LossInputs, RolloutAlgorithm
from postgrad.core import seeds
from postgrad.core.ragged import Ragged
from postgrad.ops.advantages import Floats

if TYPE_CHECKING:
    from torch import Tensor

Mask = NDArray[np.bool_]


class TokenSelection(RolloutAlgorithm):
    """Tokens are selected once a step, among all its loss tokens, with the policy as it was before
    the step: no micro-batch and no rank sees another selection.

    `top_entropy_fraction`: only so many tokens, those of the highest entropy, have a policy loss
    (Wang et al. 2025, arXiv:2506.01939). `covariance` acts on the tokens with a large product of
    (A - mean A) and (log p - mean log p), which lower the entropy most (Cui et al. 2025,
    arXiv:2505.22617): "clip" takes the loss of some of them away, drawn at random between the
    bounds; "kl" charges the largest covariance_kl_coef * |log r|. `second_moment` takes the loss of
    the tokens on which the policy has moved furthest from the sampler in the direction of A, until
    (log w)^2 of the other tokens that moved so is at most this on average (M2PO, Zheng et al. 2025,
    arXiv:2510.01161). Denominators still count every token.
    """

    top_entropy_fraction: float = Field(1.0, gt=0.0, le=1.0)
    covariance: Literal["off", "clip", "kl"] = "off"
    covariance_fraction: float = Field(2e-4, gt=0.0, le=1.0)  # of the step's loss tokens
    covariance_low: float = Field(1.0, ge=0.0)  # "clip" draws among covariances between these
    covariance_high: float = Field(5.0, gt=0.0)
    covariance_kl_coef: float = Field(1.0, gt=0.0)
    second_moment: float | None = Field(None, gt=0.0)  # most mean of (log w)^2; None: off

    @model_validator(mode="after")
    def _covariances_are_in_order(self) -> Self:
        if self.covariance_low >= self.covariance_high:
            raise ValueError(
                f"covariance_low = {self.covariance_low:g} is not below covariance_high = "
                f"{self.covariance_high:g}: no token could be drawn between them, lower the first "
                "or raise the second"
            )
        return self

    def selection(
        self,
        mask: Ragged,
        advantages: Ragged,
        logprobs: Ragged | None,
        entropy: Ragged | None,
        samples: tuple[NDArray[np.int64], NDArray[np.int64]],
        log_weights: Floats | None = None,
    ) -> tuple[dict[str, Ragged], dict[str, float]]:
        """(columns, metrics). "selected" multiplies the policy loss; "penalised" is 1 where the
        change of the logprob is charged. mask: of the loss tokens; logprobs, entropy: of the policy
        before the step; samples: ticket and number [S] of each, from which draws are made;
        log_weights: [N] log w, the logprob of the policy before the step minus the sampler's.
        """
        columns: dict[str, Ragged] = {}
        metrics: dict[str, float] = {}
        selected = mask.values.copy()
        if self.top_entropy_fraction < 1.0:
            if entropy is None:
                raise ValueError("credit needs the policy's entropies, see needs()")
            values = entropy.values.astype(np.float64)
            selected = highest(values, selected, self.top_entropy_fraction)
            metrics["selection/least_entropy"] = float(
                entropy.values[selected].min() if selected.any() else 0.0
            )
        if self.covariance != "off":
            if logprobs is None:
                raise ValueError("credit needs the policy's logprobs, see needs()")
            products = covariances(advantages.values, logprobs.values, mask.values)
            chosen = self._far(mask, products, samples)
            metrics["selection/covariance"] = float(products.sum() / max(1, mask.values.sum()))
            metrics["selection/covariance_tokens"] = float(chosen.sum())
            if self.covariance == "kl":
                columns["penalised"] = mask.like(chosen.astype(np.float32))
            else:
                selected &= ~chosen
        if self.second_moment is not None:
            if log_weights is None:
                raise ValueError("credit needs the policy's logprobs, see needs()")
            outward = selected & (advantages.values * log_weights > 0)
            squares = np.square(log_weights)
            near = least(squares, outward, self.second_moment)
            dropped = outward & ~near
            selected &= ~dropped
            moment = squares[outward].sum() / max(1, outward.sum())
            metrics["selection/second_moment"] = float(moment)
            metrics["selection/moved_fraction"] = float(dropped.sum() / max(1, mask.values.sum()))
        return columns | {"selected": mask.like(selected.astype(np.float32))}, metrics

    def _far(
        self,
        mask: Ragged,
        products: Floats,
        samples: tuple[NDArray[np.int64], NDArray[np.int64]],
    ) -> Mask:
        """[N] the tokens on which `covariance` acts: the largest, or some between the bounds."""
        if self.covariance == "kl":
            return highest(products, mask.values, self.covariance_fraction)
        low, high = self.covariance_low, self.covariance_high
        between = mask.values & (products > low) & (products < high)
        ticket, sample, start = (
            mask.spread(column).values for column in (*samples, mask.offsets[:-1])
        )
        place = np.arange(len(products)) - start
        keys = seeds.uniform(0, "clip_cov", ticket, sample, place)
        return highest(keys, between, self.covariance_fraction, among=int(mask.values.sum()))

    def penalty(self, inputs: LossInputs, old: Tensor) -> Tensor:
        """[E] what "kl" charges: |log r| at the penalised tokens, as its authors measure the
        distance from the policy before the step. It has no gradient in a step's first update.
        """
        return self.covariance_kl_coef * inputs.columns["penalised"] * (inputs.logprobs - old).abs()


class EntropyBonus(TokenSelection):
    """entropy_coef * entropy is subtracted from the loss. With `entropy_target` the coefficient
    adapts (Skywork-OR1, arXiv:2505.22312): after a step whose policy had less entropy than the
    target it grows by `entropy_coef_step`, else it falls by as much, between 0 and
    `entropy_coef_max`; and only steps at or below the target have a bonus. It begins with
    `entropy_coef`, and is run state.
    """

    entropy_coef: float = Field(0.0, ge=0.0)
    entropy_target: float | None = Field(None, gt=0.0)  # nats per token; None: it stays as it is
    entropy_coef_step: float = Field(1e-4, gt=0.0)
    entropy_coef_max: float = Field(5e-3, gt=0.0)

    @model_validator(mode="after")
    def _begins_within_its_bounds(self) -> Self:
        if self.entropy_target is not None and self.entropy_coef > self.entropy_coef_max:
            raise ValueError(
                f"entropy_coef {self.entropy_coef:g} is above entropy_coef_max "
                f"{self.entropy_coef_max:g}, at which entropy_target stops: raise that"
            )
        return self

    def entropy_bonus(
        self,
        mask: Ragged,
        entropy: Ragged | None,
        rows: NDArray[np.int64],
        state: Mapping[str, Any],
    ) -> tuple[Ragged, Mapping[str, Any], dict[str, float]]:
        """(the coefficient at every token, the next state, metrics). mask: of the loss tokens;
        entropy: of the policy before the step, of a batch with `rows`.
        """
        if entropy is None or self.entropy_target is None:
            raise ValueError("credit needs the policy's entropies, see needs()")
        before = float(state.get("entropy_coef", self.entropy_coef))
        values = entropy.take(rows).values[mask.values].astype(np.float64)
        mean = float(values.mean()) if len(values) else self.entropy_target
        change = self.entropy_coef_step * float(np.sign(self.entropy_target - mean))
        after = min(max(before + change, 0.0), self.entropy_coef_max)
        used = before if mean <= self.entropy_target else 0.0
        column = mask.like((used * mask.values).astype(np.float32))
        metrics = {"entropy/mean": mean, "entropy/coefficient": used}
        return column, {**state, "entropy_coef": after}, metrics


def covariances(
    advantages: NDArray[np.float32], logprobs: NDArray[np.float32], mask: Mask
) -> Floats:
    """(A - mean A)(log p - mean log p) at the tokens of `mask`, means over them; 0 elsewhere."""
    products = np.zeros(len(mask))
    a, p = advantages[mask].astype(np.float64), logprobs[mask].astype(np.float64)
    if len(a):
        products[mask] = (a - a.mean()) * (p - p.mean())
    return products


def highest(values: Floats, mask: Mask, fraction: float, among: int | None = None) -> Mask:
    """[N] the tokens of `mask` with the largest values, the first ones of equals: `fraction` of
    `among` tokens (those of `mask` where it is None), at least one where `mask` has any.
    """
    places = np.flatnonzero(mask)
    share = fraction * (len(places) if among is None else among)
    count = max(1, int(round(share, 9)))  # 0.29 of 100 are 29, not 28.999999999999996
    order = np.argsort(-values[places], kind="stable")[:count]
    chosen = np.zeros(len(mask), np.bool_)
    chosen[places[order]] = True
    return chosen


def least(values: Floats, mask: Mask, most: float) -> Mask:
    """[N] the tokens of `mask` with the smallest values, as many as have a mean of at most `most`;
    of equal ones the later. It takes the largest away, one by one, until the mean is small enough.
    """
    places = np.flatnonzero(mask)
    rising = places[np.argsort(-values[places], kind="stable")[::-1]]
    means = np.cumsum(values[rising]) / np.arange(1, len(rising) + 1)  # they rise too
    chosen = np.zeros(len(mask), np.bool_)
    chosen[rising[: np.count_nonzero(means <= most)]] = True
    return chosen
