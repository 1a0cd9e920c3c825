"""Zero-std groups: a group whose samples all earn the same reward gives no gradient."""

from collections.abc import Sequence

import numpy as np
from pydantic import Field

from postgrad.core.records import ScoredGroup
from postgrad.observe.sentinels.base import Level, Seen

KEY = "groups/stuck_fraction"


class NoGradient(Level):
    """Speaks while more than `limit` of the groups are stuck for `steps` steps in a row.

    A group is stuck where all its samples earn the same, and less than the step's best reward. So
    groups that are all right do not count, unless all samples of the step earn the same.
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
    """The share of stuck groups among those of several kept samples; {} where there are none."""
    rewards = [group.total[group.kept] for group in groups]
    several = [group_rewards for group_rewards in rewards if len(group_rewards) > 1]
    if not several:
        return {}
    every = np.concatenate(several)
    best = every.max() if every.min() < every.max() else np.inf
    equal = [group_rewards.min() == group_rewards.max() < best for group_rewards in several]
    return {KEY: float(np.mean(equal))}
