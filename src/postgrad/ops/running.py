"""Mean and deviation of numbers that come in batches (Welford 1962; Chan et al. 1979).

Plain sums of squares would lose the deviation of numbers that are much larger than it. NumPy,
float64.
"""

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

LEAST_STD = 1e-8  # a smaller deviation is rounding


class Moments(NamedTuple):
    """Of a set of numbers; its fields are JSON values."""

    n: int = 0  # how many numbers
    mean: float = 0.0
    squares: float = 0.0  # sum of squared distances from the mean

    @property
    def std(self) -> float:
        """The sample standard deviation (n - 1); 0 below two numbers."""
        return math.sqrt(self.squares / (self.n - 1)) if self.n > 1 else 0.0

    @property
    def unit(self) -> float:
        """What to divide by when normalising: `std`, or 1 where that is below LEAST_STD."""
        return self.std if self.std > LEAST_STD else 1.0

    def merged(self, other: "Moments") -> "Moments":
        """The moments of the numbers of both together."""
        n = self.n + other.n
        if self.n == 0 or other.n == 0:
            return other if self.n == 0 else self
        apart, share = other.mean - self.mean, other.n / n
        squares = self.squares + other.squares + apart * apart * self.n * share
        return Moments(n, self.mean + apart * share, squares)


def moments(values: NDArray[np.float64]) -> Moments:
    """The moments of one batch. Equal numbers have exactly their value as mean, and squares 0."""
    if not len(values):
        return Moments()
    mean = float(values[0] + (values - values[0]).mean())
    return Moments(len(values), mean, float(np.square(values - mean).sum()))
