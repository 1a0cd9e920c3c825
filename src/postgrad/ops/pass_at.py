"""pass@k without bias (Chen et al. 2021, arXiv:2107.03374)."""

import math
from collections.abc import Sequence


def pass_at_k(samples: int, correct: int, k: int) -> float:
    """The chance that at least one of k samples is right, from `correct` out of `samples`.

    1 - C(n - c, k) / C(n, k): the mean over all choices of k samples, not 1 - (1 - c/n)^k, which is
    biased. Raises ValueError unless 1 <= k <= n.
    """
    if not 1 <= k <= samples:
        raise ValueError(f"pass@{k} needs at least {k} samples, there are {samples}")
    return 1.0 - math.comb(samples - correct, k) / math.comb(samples, k)


def chances(counts: Sequence[tuple[int, int]], k: int) -> list[float]:
    """pass@k of each problem, given as (samples, correct), that has k samples."""
    return [pass_at_k(n, c, k) for n, c in counts if n >= k]


def mean_pass_at_k(counts: Sequence[tuple[int, int]], k: int) -> float:
    """The mean over problems; NaN where no problem has k samples."""
    found = chances(counts, k)
    return sum(found) / len(found) if found else math.nan
