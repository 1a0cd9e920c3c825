"""Policy losses by token, before any aggregation. Tensors are [E], one value per loss entry."""

from __future__ import annotations

from typing import TYPE_CHECKING

from postgrad.ops.kl import MAX_EXPONENT

if TYPE_CHECKING:
    from torch import Tensor


def bounded_ratio(logprobs: Tensor, old_logprobs: Tensor) -> Tensor:
    """exp(logp - logp_old) with the exponent bounded at +-MAX_EXPONENT; no gradient beyond."""
    return (logprobs - old_logprobs).clamp(-MAX_EXPONENT, MAX_EXPONENT).exp()


def ppo_clip(ratio: Tensor, advantages: Tensor, low: float, high: float) -> Tensor:
    """-min(r A, clip(r, 1 - low, 1 + high) A) (PPO, arXiv:1707.06347).

    Separate bounds are DAPO's clip-higher (arXiv:2503.14476).
    """
    return -(ratio * advantages).minimum(ratio.clamp(1.0 - low, 1.0 + high) * advantages)


def clipped_low(ratio: Tensor, advantages: Tensor, low: float) -> Tensor:
    """True where the lower bound stops the gradient: r < 1 - low and A < 0."""
    return (ratio < 1.0 - low) & (advantages < 0)


def clipped_high(ratio: Tensor, advantages: Tensor, high: float) -> Tensor:
    """True where the upper bound stops the gradient: r > 1 + high and A > 0."""
    return (ratio > 1.0 + high) & (advantages > 0)
