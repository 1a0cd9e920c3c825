"""Whether several engines say the same of the same tokens: then they have the same weights."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from postgrad.core.errors import RunError

# How far engines with the same weights may lie apart on the same tokens (nats, mean over a probe).
AGREEMENT = {"float32": 1e-4, "bfloat16": 5e-3}
Floats = NDArray[np.float32]


def distance(first: Sequence[Floats], second: Sequence[Floats]) -> float:
    """Mean difference of two lists of logprobs of the same tokens, in nats."""
    return float(np.abs(np.concatenate(first) - np.concatenate(second)).mean())


def agreed(logprobs: Sequence[list[Floats]], dtype: str, title: str) -> list[Floats]:
    """What the first of several engines said.

    dtype: what they compute in. title: what one of them is called.

    Raises RunError where another one lies too far from it to have its weights.
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
