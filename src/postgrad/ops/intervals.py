"""Statistics of evaluations: 95% confidence intervals of rates and losses, pass@k, maj@k,
calibration of a reward model's margins, and tests of the difference of two models on the same
problems.

Intervals tell how far rates would move with other problems of the same kind. Samples of one problem
are not independent, so a problem counts once, by the mean of its samples (Miller 2024,
arXiv:2411.00640, where a problem is a cluster). NumPy, float64.
"""

import math
from collections.abc import Mapping, Sequence
from fractions import Fraction
from functools import lru_cache
from statistics import NormalDist
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from postgrad.core.seeds import bits

Z = NormalDist().inv_cdf(0.975)  # 1.96: two sides of 2.5% each
FEW_DEGREES = (12.7062, 4.30265, 3.18245, 2.77645)  # of Student's t, two sides of 2.5% each
AGREEING = 2  # pseudo-problems, each with equal samples, that `mean_interval` adds to the data

BINS = 10

EXACT = 16  # up to so many differences that are not zero all choices of signs are tried
FLIPS = 99_999  # choices of signs that are drawn otherwise
AT_ONCE = 1024  # choices of signs in one array


class Interval(NamedTuple):
    """A confidence interval; NaN where there is no data."""

    low: float
    high: float

    def overlaps(self, other: "Interval") -> bool:
        """Whether they have a number in common."""
        return other.low <= self.high and self.low <= other.high

    def within(self, least: float, most: float) -> "Interval":
        """The part of it that a number from `least` to `most` can have. It holds the truth as often
        as before, since that is there too. NaN stays.
        """
        if math.isnan(self.low) or math.isnan(self.high):
            return self
        return Interval(max(least, self.low), min(most, self.high))

    def text(self) -> str:
        """For people: "0.4811 to 0.5432"."""
        return f"{self.low:.4g} to {self.high:.4g}"


NO_INTERVAL = Interval(math.nan, math.nan)


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
        return NO_INTERVAL
    per_problem = np.asarray(values, np.float64)
    rate = float(per_problem.mean())
    single = rate * (1 - rate)
    ratio = float(per_problem.var()) / single if single > 0 else 1.0
    smoothed = (n * ratio + AGREEING) / (n + AGREEING)
    return wilson(rate, n / smoothed)


def student(degrees: int) -> float:
    """The 97.5% quantile of Student's t: of fewer than 5 degrees of freedom from a table, else by
    its expansion in 1 / degrees (Abramowitz and Stegun 26.7.5), within 0.1%.
    """
    if degrees <= len(FEW_DEGREES):
        return FEW_DEGREES[degrees - 1]
    z, v = Z, degrees
    return (
        z
        + (z**3 + z) / (4 * v)
        + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * v**2)
        + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * v**3)
        + (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / (92160 * v**4)
    )


def ratio_interval(sums: NDArray[np.float64], counts: NDArray[np.float64]) -> Interval:
    """The interval of sum(sums) / sum(counts) over rows, such as a loss per token over held-out
    conversations.

    sums, counts: [rows]. The tokens of a row are not independent, so a row is a cluster: the
    standard error is that of the linearised ratio (Cochran 1977, section 6.4), the quantile is
    Student's. NaN for fewer than two rows, and without counts.
    """
    n, total = len(sums), float(counts.sum())
    if n < 2 or total <= 0:
        return NO_INTERVAL
    ratio = float(sums.sum()) / total
    residuals = sums - ratio * counts
    half = student(n - 1) * math.sqrt(n / (n - 1) * float(residuals @ residuals)) / total
    return Interval(ratio - half, ratio + half)


def pass_at_k(samples: int, correct: int, k: int) -> float:
    """The chance that at least one of k samples is right, from `correct` out of `samples`.

    1 - C(n - c, k) / C(n, k): the mean over all choices of k samples, not 1 - (1 - c/n)^k, which is
    biased. Raises ValueError unless 1 <= k <= n.
    """
    if not 1 <= k <= samples:
        raise ValueError(f"pass@{k} needs at least {k} samples, there are {samples}")
    return 1.0 - math.comb(samples - correct, k) / math.comb(samples, k)


@lru_cache(maxsize=4096)  # whole, by dataset and in comparisons the same problems are asked for
def majority_at_k(right: int, wrong: tuple[int, ...], silent: int, k: int) -> float:
    """The chance that most votes of k samples are for the right answer (Wang et al. 2022,
    arXiv:2203.11171), exactly: the mean over all choices of k samples.

    right: samples with the right answer; wrong: samples of each different wrong answer; silent:
    samples without an answer, which vote for nothing. One of several answers with as many votes is
    taken at random; without any vote the answer is wrong. Raises ValueError unless k is from 1 to
    the number of samples.
    """
    samples = right + sum(wrong) + silent
    if not 1 <= k <= samples:
        raise ValueError(f"maj@{k} needs at least {k} samples, there are {samples}")
    chosen = Fraction()
    for votes in range(1, min(right, k) + 1):
        ways = {(votes, 0): math.comb(right, votes)}  # by samples taken, answers with as many votes
        for count in wrong:
            ways = _with_answer(ways, count, votes, k)
        for (taken, ties), number in ways.items():
            chosen += Fraction(number * math.comb(silent, k - taken), ties + 1)
    return float(chosen / math.comb(samples, k))


def _with_answer(
    ways: Mapping[tuple[int, int], int], count: int, most: int, k: int
) -> dict[tuple[int, int], int]:
    """The choices with up to `most` of `count` samples of one more answer, and at most k in all."""
    more: dict[tuple[int, int], int] = {}
    for (taken, ties), number in ways.items():
        for votes in range(min(most, count, k - taken) + 1):
            place = taken + votes, ties + (votes == most)
            more[place] = more.get(place, 0) + number * math.comb(count, votes)
    return more


def calibration_error(margins: NDArray[np.float64]) -> float:
    """The expected calibration error of Bradley-Terry's confidence (Guo et al. 2017,
    arXiv:1706.04599): |mean confidence - share of right pairs| in ten bins of the confidence
    max(p, 1 - p), p = sigmoid(margin), averaged over pairs. A margin of 0 counts as half right.
    """
    p = np.exp(-np.logaddexp(0.0, -np.abs(margins)))
    right = np.where(margins == 0, 0.5, margins > 0)
    place = np.minimum(((p - 0.5) * 2 * BINS).astype(np.int64), BINS - 1)
    gaps = np.bincount(place, weights=right - p, minlength=BINS)
    return float(np.abs(gaps).sum() / len(margins))


def margin_histogram(margins: NDArray[np.float64]) -> tuple[list[float], list[int]]:
    """(edges [2 BINS + 1], counts [2 BINS]) of a histogram of the margins."""
    counts, edges = np.histogram(margins, 2 * BINS)
    return edges.tolist(), counts.tolist()


def mcnemar(only_first: int, only_second: int) -> float:
    """The two-sided p-value of McNemar's exact test.

    only_first, only_second: problems that this model alone solved. Where both are equally good,
    each of these is either model's with chance 1/2: a binomial. 1.0 without such problems.
    """
    n = only_first + only_second
    tail = sum(math.comb(n, i) for i in range(min(only_first, only_second) + 1))
    return min(1.0, 2 * tail / 2**n)


def sign_flip(differences: Sequence[float], seed: int) -> float:
    """The two-sided p-value of a permutation test on the differences of each problem.

    Where both models are equally good, a problem's difference has either sign with chance 1/2; no
    distribution is assumed (Fisher 1935; Dror et al. 2018 for language). For up to EXACT
    differences that are not zero all choices of signs are tried. Else FLIPS of them are drawn from
    `seed`, and the observed one is counted too (Phipson and Smyth 2010), so that p is never 0. For
    differences of -1, 0 and 1 the result is that of `mcnemar`.
    """
    sizes = np.abs(np.array([difference for difference in differences if difference], np.float64))
    observed = abs(math.fsum(differences))
    if not len(sizes):
        return 1.0
    reached = observed - 1e-9 * float(sizes.sum())  # sums in another order round differently
    exact = len(sizes) <= EXACT
    flips = 2 ** len(sizes) if exact else FLIPS
    words = np.arange(-(-len(sizes) // 64), dtype=np.uint64)
    extreme = 0
    for start in range(0, flips, AT_ONCE):
        numbers = np.arange(start, min(start + AT_ONCE, flips), dtype=np.uint64)
        choices = numbers[:, None] if exact else bits(seed, "sign flip", numbers[:, None], words)
        kept = _digits(choices, len(sizes)) @ sizes
        extreme += int((np.abs(2.0 * kept - sizes.sum()) >= reached).sum())
    return extreme / flips if exact else (extreme + 1) / (flips + 1)


def difference_interval(differences: Sequence[float]) -> Interval:
    """The 95% interval of the mean of one difference in [-1, 1] for each problem.

    Mean +- 1.96 standard errors, after adding one problem that only the first model solved and one
    that only the second did. For single answers this is Bonett and Price's interval (2012), which
    Fagerland, Lydersen and Laake (2014) recommend; its width is not 0 where all differences are
    equal.
    """
    if not len(differences):
        return NO_INTERVAL
    n = len(differences) + 2
    mean = math.fsum(differences) / n
    variance = (math.fsum(d * d for d in differences) + 2.0) / n - mean * mean
    half = Z * math.sqrt(max(variance, 0.0) / n)
    return Interval(max(-1.0, mean - half), min(1.0, mean + half))


def _digits(words: NDArray[np.uint64], n: int) -> NDArray[np.uint8]:
    """[numbers, n] the n lowest binary digits of [numbers, words], the first word lowest."""
    octets = words.astype("<u8").view(np.uint8)
    return np.unpackbits(octets, axis=1, count=n, bitorder="little")


def harmonic_interval(first: Sequence[float], second: Sequence[float]) -> tuple[float, Interval]:
    """The harmonic mean 2ab / (a + b) of two rates a, b over different problems, each with a value
    in {0, 1}, and its interval. NaN where one of them has no problem; 0 where both are 0.

    The mean grows with either rate. Each end is reached from the estimate by moving the rates to
    their Wilson bounds one by one and adding the two distances in squares (the square-and-add
    method of Zou and Donner 2008): valid near 0 and 1, where a standard error is not.
    """
    if not first or not second:
        return math.nan, NO_INTERVAL
    a, b = sum(first) / len(first), sum(second) / len(second)
    bounds_a, bounds_b = wilson(a, len(first)), wilson(b, len(second))
    mean = _harmonic(a, b)
    if mean == 0:  # a rate of 0 holds the mean at 0 however far the other one moves
        return 0.0, Interval(0.0, _harmonic(bounds_a.high, bounds_b.high))
    down, up = (
        math.hypot(_harmonic(moved_a, b) - mean, _harmonic(a, moved_b) - mean)
        for moved_a, moved_b in zip(bounds_a, bounds_b, strict=True)
    )
    return mean, Interval(max(0.0, mean - down), min(1.0, mean + up))


def _harmonic(a: float, b: float) -> float:
    return 2 * a * b / (a + b) if a + b > 0 else 0.0
