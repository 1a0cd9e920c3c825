"""Two models on the same problems: is the difference more than chance, and how large may it be.

The problems' own difficulty cancels in the differences, which is most of the variance (Miller 2024,
arXiv:2411.00640). NumPy, float64.
"""

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from postgrad.core.seeds import bits
from postgrad.ops.intervals import NOTHING, Interval, Z

EXACT = 16  # differences that are not zero, up to which every choice of signs is tried
FLIPS = 99_999  # choices of signs that are drawn where there are more
AT_ONCE = 1024  # of them


def mcnemar(only_first: int, only_second: int) -> float:
    """The two-sided p-value of McNemar's exact test.

    Of the problems that one of the two models alone has right, either model has each with chance
    1/2 where they are equally good: a binomial. 1.0 where there is none.
    """
    n = only_first + only_second
    tail = sum(math.comb(n, i) for i in range(min(only_first, only_second) + 1))
    return min(1.0, 2 * tail / 2**n)


def sign_flip(differences: Sequence[float], seed: int) -> float:
    """The two-sided p-value of a permutation test on the differences of each problem.

    Where both models answer alike, a problem's difference has either sign with chance 1/2, and no
    distribution need be assumed (Fisher 1935; Dror et al. 2018 for language). All signs are tried
    for up to EXACT differences that are not zero, else FLIPS of them are drawn from `seed`, and the
    observed one is counted among them (Phipson and Smyth 2010), so that p is never 0. For
    differences of -1, 0 and 1 this is `mcnemar`.
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

    Mean +- 1.96 standard errors after one problem that only the first model has right and one that
    only the second has were added. For single answers this is Bonett and Price's interval (2012),
    the one that Fagerland, Lydersen and Laake (2014) recommend; it has a width where all
    differences are equal.
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
