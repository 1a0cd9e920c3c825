"""All new weights for a model at once."""

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from postgrad.rollout.engine import WeightIntake


def take_over(lm: Any, weights: Iterable[tuple[str, Tensor]], *, borrow: bool = False) -> None:
    intake = WeightIntake(lm, borrow=borrow)
    intake.take(weights)
    intake.require_all()
