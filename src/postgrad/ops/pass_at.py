"""pass@k without bias (Chen et al. 2021, arXiv:2107.03374)."""

import math


def pass_at_k(samples: int, correct: int, k: int) -> float:
    """The chance that at least one of k samples is right, from `correct` out of `samples`.

    1 - C(n - c, k) / C(n, k): the mean over all choices of k samples, not 1 - (1 - c/n)^k, which is
    biased. Raises ValueError unless 1 <= k <= n.
    """
    if not 1 <= k <= samples:
        raise ValueError(f"pass@{k} needs at least {k} samples, there are {samples}")
    return 1.0 - math.comb(samples - correct, k) / math.comb(samples, k)
