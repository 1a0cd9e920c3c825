"""How far a policy has moved from its reference, estimated token by token.

The estimators are Schulman's (http://joschu.net/blog/kl-approx.html), of d = logp - logp_ref at
tokens that the policy wrote:

    k1 = d                  unbiased, may be negative
    k2 = d**2 / 2           biased, its gradient is that of the KL
    k3 = exp(-d) - 1 + d    unbiased, never negative

The functions work on NumPy columns (KL in the reward) and on torch tensors (KL in the loss).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from torch import Tensor

Estimator = Literal["k1", "k2", "k3"]
Array = TypeVar("Array", "NDArray[Any]", "Tensor")

MAX_EXPONENT = 20.0  # exp(20) = 4.9e8: far outside any trust region, far inside float32
MAX_STEP = 0.2  # relative error to which one adaptation of the coefficient is clipped


def estimate(kind: Estimator, d: Array) -> Array:
    """The KL of each token, of the shape and type of `d`.

    k3 bounds d from below at -MAX_EXPONENT, the side on which exp(-d) overflows: there its value is
    a constant and its gradient 0. Without the bound on both terms the gradient would change sign.
    exp(-d) - 1 is one function: in float32 the difference of a number near 1 and 1 would be more
    rounding than KL wherever d is below 1e-3, and negative at some tokens.
    """
    if kind == "k1":
        return d
    if kind == "k2":
        return d * d / 2
    bounded = d.clip(-MAX_EXPONENT, None)
    return _expm1(-bounded) + bounded


def bounded(token_kl: Array, most: float) -> tuple[Array, Array]:
    """KLs of tokens within -most and most, without a gradient beyond, and True where one was not:
    a k3 of few tokens that the policy has all but given up would decide the whole gradient.
    """
    return token_kl.clip(-most, most), (token_kl < -most) | (token_kl > most)


def overflows(kind: Estimator, d: Array) -> Array:
    """True where `estimate` had to bound an exponent."""
    return d < (-MAX_EXPONENT if kind == "k3" else -np.inf)


def adapted_coefficient(
    coefficient: float, kl: float, *, target: float, samples: int, horizon: int
) -> float:
    """The KL coefficient of the next step: larger when `kl` is over `target`, smaller when under.

    coefficient * (1 + clip(kl / target - 1, +-0.2) * samples / horizon), Ziegler et al. 2019
    (arXiv:1909.08593). `kl` is the mean k1 over the loss-bearing tokens of the step's `samples`.
    """
    error = min(max(kl / target - 1.0, -MAX_STEP), MAX_STEP)
    return coefficient * (1.0 + error * samples / horizon)


def _expm1(x: Array) -> Array:
    if isinstance(x, np.ndarray):
        return np.expm1(cast("NDArray[Any]", x))
    return x.expm1()
