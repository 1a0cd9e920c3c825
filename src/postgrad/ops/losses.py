"""Policy losses by token, before any aggregation. Tensors are [E], one value per loss entry."""

from __future__ import annotations

from typing import TYPE_CHECKING

from postgrad.ops.kl import MAX_EXPONENT

if TYPE_CHECKING:
    from torch import Tensor


def bounded_ratio(logprobs: Tensor, old_logprobs: Tensor) -> Tensor:
    """exp(logp - logp_old) with the exponent bounded at +-MAX_EXPONENT; no gradient beyond."""
    return bounded_exp(logprobs - old_logprobs)


def bounded_exp(exponent: Tensor) -> Tensor:
    """exp of [E], bounded at +-MAX_EXPONENT; no gradient beyond."""
    return exponent.clamp(-MAX_EXPONENT, MAX_EXPONENT).exp()


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


def dual_clip(loss: Tensor, advantages: Tensor, bound: float) -> Tensor:
    """PPO's loss, at most bound * |A| where A < 0: a ratio that exploded there pushes no further
    (Ye et al. 2020, arXiv:1912.09729). bound > 1.
    """
    return loss.where(advantages >= 0, loss.minimum(-bound * advantages))


def cispo(ratio: Tensor, logprobs: Tensor, advantages: Tensor, high: float) -> Tensor:
    """-A * stopgrad(min(r, 1 + high)) * logp: the weight is bounded, the gradient of no token is
    lost (MiniMax-M1, arXiv:2506.13585).
    """
    return -advantages * ratio.detach().clamp(max=1.0 + high) * logprobs


def sequence_sums(values: Tensor, sequence: Tensor, n_sequences: int) -> Tensor:
    """[n_sequences] the sum over the entries of each sequence; sequence: [E] int64."""
    return values.new_zeros(n_sequences).index_add(0, sequence, values)


def sequence_means(values: Tensor, sequence: Tensor, n_sequences: int) -> Tensor:
    """[E] the mean over the entries of each entry's sequence; sequence: [E] int64."""
    sums = sequence_sums(values, sequence, n_sequences)
    counts = sequence_sums(values.detach().new_ones(len(values)), sequence, n_sequences)
    return (sums / counts.clamp(min=1)).index_select(0, sequence)
