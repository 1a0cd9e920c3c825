"""Agreement of engines: those with the same weights give the same tokens the same logprobs."""

from collections.abc import Sequence

import numpy as np

from postgrad.core.errors import RunError
from postgrad.core.records import Logprobs

# The most that engines with the same weights may differ: mean over a probe's tokens, in nats.
AGREEMENT = {"float32": 1e-4, "bfloat16": 5e-3}


def distance(first: Sequence[Logprobs], second: Sequence[Logprobs]) -> float:
    """Mean absolute difference of two lists of logprobs of the same tokens, in nats."""
    return float(np.abs(np.concatenate(first) - np.concatenate(second)).mean())


def agreed(logprobs: Sequence[list[Logprobs]], dtype: str, title: str) -> list[Logprobs]:
    """The logprobs of the first engine, once all others are found to agree with them.

    logprobs: for each engine those of the same sequences. dtype: what they compute in. title: what
    messages call an engine. Raises RunError where one differs by more than AGREEMENT[dtype].
    """
    first, *others = logprobs
    for number, other in enumerate(others, 1):
        apart = distance(first, other)
        if not apart <= AGREEMENT[dtype]:  # NaN is no agreement
            raise RunError(
                f"{title} {number} does not have the weights of {title} 0: mean logprob "
                f"difference {apart:.4g} on the same tokens (limit {AGREEMENT[dtype]:g})"
            )
    return first
