"""Compares two models on the same problems: tests and intervals for their difference.

In the differences the problems' difficulty cancels, which is most of the variance (Miller 2024,
arXiv:2411.00640). NumPy, float64.
"""

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from postgrad.core.seeds import bits
from postgrad.ops.intervals import NOTHING, Interval, Z

EXACT = 16  # up to so many differences that are not zero all choices of signs are tried
FLIPS = 99_999  # choices of signs that are drawn otherwise
AT_ONCE = 1024  # choices of signs in one array


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
        return NOTHING
    n = len(differences) + 2
    mean = math.fsum(differences) / n
    variance = (math.fsum(d * d for d in differences) + 2.0) / n - mean * mean
    half = Z * math.sqrt(max(variance, 0.0) / n)
    return Interval(max(-1.0, mean - half), min(1.0, mean + half))


def _digits(words: NDArray[np.uint64], n: int) -> NDArray[np.uint8]:
    """[numbers, n] the n lowest binary digits of [numbers, words], the first word lowest."""
    octets = words.astype("<u8").view(np.uint8)
    return np.unpackbits(octets, axis=1, count=n, bitorder="little")
