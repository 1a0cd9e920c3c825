"""The first update of a step has to be on-policy: its ratios to the old logprobs are 1."""

import math

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from postgrad.observe.sentinels.base import Look, Seen, Sentinel, SentinelMemory

KEY = "sentinel/on_policy"
# compute dtype -> what rounding alone gives
LIMITS = {"float32": 1e-4, "bfloat16": 0.02, "float16": 0.02}


class OnPolicy(Sentinel):
    """Speaks where the first update's mean |ratio - 1| over tokens exceeds `limit`, in algorithms
    that compute old logprobs in a separate forward pass.

    Then the two forward passes differ, for example in dropout, masks or positions.
    """

    limit: float | None = Field(default=None, gt=0.0)  # None: by the compute dtype

    def for_dtype(self, dtype: str) -> "OnPolicy":
        """A copy with the limit for the learner's compute dtype."""
        limit = self.limit if self.limit is not None else LIMITS.get(dtype, max(LIMITS.values()))
        return self.model_copy(update={"limit": limit})

    def look(self, seen: Seen, before: SentinelMemory) -> Look | None:
        if KEY not in seen:
            return None
        value, limit = seen[KEY], self.limit or LIMITS["float32"]
        if value <= limit:
            return Look({})
        return Look(
            {},
            message=f"the first update of the step is not on-policy: mean |ratio - 1| {value:.3g} "
            f"(limit {limit:g}) between two forwards of the same weights; the loss clips a ratio "
            "that should be 1: look for what differs between scoring and training",
        )


def ratio_distance(
    old: NDArray[np.float32], now: NDArray[np.float32], mask: NDArray[np.bool_]
) -> dict[str, float]:
    """{sentinel/on_policy: mean |exp(now - old) - 1|} over the tokens [N] of `mask`; {} where there
    are none. NaN in `now` marks logprobs that were not computed: such tokens do not count.
    """
    both = mask & ~np.isnan(now)
    if not both.any():
        return {}
    change = now[both].astype(np.float64) - old[both]
    bounded = np.clip(np.nan_to_num(change, nan=math.inf), -20.0, 20.0)
    return {KEY: float(np.abs(np.expm1(bounded)).mean())}
