"""Mean and deviation of what comes in batches, exact in any split (Welford 1962; Chan et al. 1979).

Sums of squares would lose the deviation of numbers that are large beside it. NumPy, float64.
"""

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

LEAST_STD = 1e-8  # below which differences are rounding


class Moments(NamedTuple):
    """How many numbers, their mean, the sum of squared distances from it: JSON values."""

    n: int = 0
    mean: float = 0.0
    squares: float = 0.0

    @property
    def std(self) -> float:
        """The sample standard deviation (n - 1); 0 below two numbers."""
        return math.sqrt(self.squares / (self.n - 1)) if self.n > 1 else 0.0

    @property
    def unit(self) -> float:
        """What to divide by: the deviation, or 1 where there is none to speak of."""
        return self.std if self.std > LEAST_STD else 1.0

    def merged(self, other: "Moments") -> "Moments":
        """Of the numbers of both."""
        n = self.n + other.n
        if self.n == 0 or other.n == 0:
            return other if self.n == 0 else self
        apart, share = other.mean - self.mean, other.n / n
        squares = self.squares + other.squares + apart * apart * self.n * share
        return Moments(n, self.mean + apart * share, squares)


def moments(values: NDArray[np.float64]) -> Moments:
    """Of one batch. Numbers that are all equal have exactly their mean and no deviation."""
    if not len(values):
        return Moments()
    mean = float(values[0] + (values - values[0]).mean())
    return Moments(len(values), mean, float(np.square(values - mean).sum()))
