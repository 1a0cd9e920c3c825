"""Pass@k training: a set of samples is as good as its best (Chen et al. 2025, arXiv:2508.10751)."""

from typing import ClassVar

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from postgrad.algorithms.policy_gradient import PolicyGradient
from postgrad.ops.advantages import pass_at_k


class PassAtK(PolicyGradient):
    """A sample's advantage is the mean of those of all sets of k samples that it is in.

    A set is right if any of its samples is, and sets are normalised as GRPO normalises samples.
    The mean over sets is taken in closed form. Wrong samples of a group with few right ones are
    hardly punished, and a group of which nearly all are right has hardly a gradient: the policy
    keeps more than one way to answer.
    """

    unread: ClassVar[tuple[str, ...]] = ("length_penalty", "reward_scaling", "reward_clip", "kl_in")

    k: int = Field(4, ge=2)
    right_above: float = 0.5  # a sample is right if its reward is above this

    @property
    def min_group_size(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        """A group of k samples or fewer is one set, which has no deviation."""
        return self.k + 1

    def advantages(
        self, rewards: NDArray[np.float64], group: NDArray[np.int64]
    ) -> NDArray[np.float64]:
        return pass_at_k(rewards > self.right_above, group, self.k)
