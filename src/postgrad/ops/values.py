"""The critic's loss by token, before any aggregation. Tensors are [E], one value a loss entry."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def value_loss(values: Tensor, old: Tensor, returns: Tensor, clip: float | None) -> Tensor:
    """0.5 * max((V - R)^2, (V_old + clip(V - V_old, +-c) - R)^2); without c 0.5 * (V - R)^2.

    A value that has already moved more than c towards its return gets no gradient (OpenAI
    baselines' PPO; Huang et al. 2022, "The 37 Implementation Details of PPO").
    """
    loss = (values - returns).square()
    if clip is not None:
        loss = loss.maximum((_near(values, old, clip) - returns).square())
    return 0.5 * loss


def value_clipped(values: Tensor, old: Tensor, returns: Tensor, clip: float | None) -> Tensor:
    """True where the clip stops the gradient."""
    if clip is None:
        return values.new_zeros(len(values)).bool()
    return (_near(values, old, clip) - returns).square() > (values - returns).square()


def _near(values: Tensor, old: Tensor, clip: float) -> Tensor:
    return old + (values - old).clamp(-clip, clip)


def explained_variance(
    error: float, error_square: float, returns: float, returns_square: float
) -> float:
    """1 - Var(R - V) / Var(R), from the means of R - V and R and of their squares.

    1: values equal returns; 0: as good as a constant; negative: worse than a constant. 0 where all
    returns are equal.
    """
    spread = returns_square - returns * returns
    if spread <= 1e-12 * returns_square:  # what rounding leaves of equal returns
        return 0.0
    return 1.0 - (error_square - error * error) / spread
