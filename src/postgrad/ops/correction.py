"""Importance weights for samples that another policy drew: an engine with other kernels, or with
older weights.

log_ratio: [E] logp_old - logp_sampled, detached; w = exp(log_ratio). Every function returns factors
[E] of the policy loss. Tokens whose factor is 0 still count in the loss's denominator.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from postgrad.ops.losses import bounded_exp, sequence_means

if TYPE_CHECKING:
    from torch import Tensor

Correction = Literal["off", "metrics", "tis", "icepop", "sequence_mask"]
CORRECTION_BOUNDS: dict[str, tuple[float, float]] = {  # low, high, where a recipe leaves them out
    "tis": (0.0, 2.0),
    "icepop": (0.5, 5.0),
    "sequence_mask": (0.99, 1.01),
}


def truncated_importance(log_ratio: Tensor, high: float) -> Tensor:
    """min(w, high): truncated importance sampling (TIS)."""
    return bounded_exp(log_ratio).clamp(max=high)


def masked_importance(log_ratio: Tensor, low: float, high: float) -> Tensor:
    """w where it lies in [low, high], else 0 (IcePop)."""
    w = bounded_exp(log_ratio)
    return w * ((w >= low) & (w <= high))


def sequence_masked_importance(
    log_ratio: Tensor, sequence: Tensor, n_sequences: int, low: float, high: float
) -> Tensor:
    """1 for the sequences whose geometric mean of w lies in [low, high], else 0."""
    mean = bounded_exp(sequence_means(log_ratio, sequence, n_sequences))
    return ((mean >= low) & (mean <= high)).to(log_ratio.dtype)
