"""How far a rate would move with other problems of the same kind: 95% intervals over problems.

Samples of one problem are not independent, so a problem counts once, by the mean of its samples
(Miller 2024, arXiv:2411.00640, where a problem is a cluster). NumPy, float64.
"""

import math
from collections.abc import Sequence
from statistics import NormalDist
from typing import NamedTuple

import numpy as np

Z = NormalDist().inv_cdf(0.975)  # 1.96: two sides of 2.5% each
AGREEING = 2  # problems whose samples all agree that `mean_interval` adds to what it saw


class Interval(NamedTuple):
    """Its ends; NaN where there is nothing to tell from."""

    low: float
    high: float


NOTHING = Interval(math.nan, math.nan)


def wilson(rate: float, n: float) -> Interval:
    """Wilson's score interval (1927) of a rate over n independent answers.

    It holds for few answers and for rates of 0 and 1, where rate +- 1.96 standard errors does not
    (Brown, Cai and DasGupta 2001). n may be an effective number, which is no whole one.
    """
    centre = (rate + Z * Z / (2 * n)) / (1 + Z * Z / n)
    half = Z * math.sqrt(rate * (1 - rate) / n + Z * Z / (4 * n * n)) / (1 + Z * Z / n)
    low = max(0.0, centre - half) if rate > 0 else 0.0  # exactly, which rounding would miss
    high = min(1.0, centre + half) if rate < 1 else 1.0
    return Interval(low, high)


def mean_interval(values: Sequence[float]) -> Interval:
    """The interval of the mean of one value in [0, 1] for each problem, such as its accuracy.

    Wilson's, with the number of independent answers that would have this standard error over
    problems (Dean and Pagano 2015). One answer a problem gives Wilson's own interval. The ratio of
    the problems' variance to that of single answers is smoothed by AGREEING problems of ratio 1,
    the largest there is: few problems of equal value do not show that all are equal.
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
