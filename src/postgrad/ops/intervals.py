"""95% confidence intervals of rates: how far they would move with other problems of the same kind.

Samples of one problem are not independent, so a problem counts once, by the mean of its samples
(Miller 2024, arXiv:2411.00640, where a problem is a cluster). NumPy, float64.
"""

import math
from collections.abc import Sequence
from statistics import NormalDist
from typing import NamedTuple

import numpy as np

Z = NormalDist().inv_cdf(0.975)  # 1.96: two sides of 2.5% each
AGREEING = 2  # pseudo-problems, each with equal samples, that `mean_interval` adds to the data


class Interval(NamedTuple):
    """A confidence interval; NaN where there is no data."""

    low: float
    high: float


NOTHING = Interval(math.nan, math.nan)


def wilson(rate: float, n: float) -> Interval:
    """Wilson's score interval (1927) of a rate over n independent answers.

    It is valid for few answers and for rates of 0 and 1, where rate +- 1.96 standard errors is not
    (Brown, Cai and DasGupta 2001). n may be an effective number, not an integer.
    """
    centre = (rate + Z * Z / (2 * n)) / (1 + Z * Z / n)
    half = Z * math.sqrt(rate * (1 - rate) / n + Z * Z / (4 * n * n)) / (1 + Z * Z / n)
    low = max(0.0, centre - half) if rate > 0 else 0.0  # exactly, which rounding would miss
    high = min(1.0, centre + half) if rate < 1 else 1.0
    return Interval(low, high)


def mean_interval(values: Sequence[float]) -> Interval:
    """The interval of the mean of one value in [0, 1] for each problem, such as its accuracy.

    Wilson's interval for the number of independent answers that would have the same standard error
    (Dean and Pagano 2015). With one answer a problem it is Wilson's own. The ratio of the variance
    over problems to that of single answers is smoothed by AGREEING problems of ratio 1, the
    largest: a few problems of equal value do not prove that all are equal.
    """
    n = len(values)
    if n == 0:
        return NOTHING
    per_problem = np.asarray(values, np.float64)
    rate = float(per_problem.mean())
    single = rate * (1 - rate)
    ratio = float(per_problem.var()) / single if single > 0 else 1.0
    smoothed = (n * ratio + AGREEING) / (n + AGREEING)
    return wilson(rate, n / smoothed)
