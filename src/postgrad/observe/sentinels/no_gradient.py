"""Groups whose samples all earn the same teach nothing."""

from collections.abc import Sequence

import numpy as np
from pydantic import Field

from postgrad.core.records import ScoredGroup
from postgrad.observe.sentinels.base import Level, Seen

KEY = "groups/stuck_fraction"


class NoGradient(Level):
    """Speaks while more than `limit` of the groups are stuck for `steps` steps in a row: all their
    samples earn the same, and less than the best of the step. Groups that are all right are no
    illness, unless the whole step earns one and the same.
    """

    limit: float = Field(default=0.9, gt=0.0, lt=1.0)
    steps: int = Field(default=5, ge=1)

    def value(self, seen: Seen) -> float | None:
        return seen.get(KEY)

    def tell(self, value: float, seen: Seen) -> str:
        return (
            f"{value:.0%} of the groups have no gradient (limit {self.limit:.0%}): all their "
            f"samples earn the same; the mean reward is {seen['reward']:.3g}: take easier "
            "questions, more samples a prompt, SFT first, or a reward with partial credit; if "
            "every answer is right, the task is learned"
        )


def stuck(groups: Sequence[ScoredGroup]) -> dict[str, float]:
    """The share of groups of several kept samples that are stuck, {} where there is none."""
    rewards = [group.total[group.kept] for group in groups]
    several = [one for one in rewards if len(one) > 1]
    if not several:
        return {}
    every = np.concatenate(several)
    best = every.max() if every.min() < every.max() else np.inf
    equal = [one.min() == one.max() < best for one in several]
    return {KEY: float(np.mean(equal))}
