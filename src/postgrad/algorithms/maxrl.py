"""MaxRL: maximum likelihood reinforcement learning (Tajwar et al. 2026, arXiv:2602.02710)."""

from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from postgrad.algorithms.policy_gradient import PolicyGradient
from postgrad.ops.advantages import relative


class MaxRL(PolicyGradient):
    """A sample's advantage is its reward minus the group's mean, divided by that mean.

    With rewards of 0 and 1 the mean is the pass rate p, and the gradient that of log p, not of p:
    rare successes count most. A group whose mean is not above 0 has no gradient.
    """

    unread: ClassVar[tuple[str, ...]] = ("length_penalty", "reward_scaling", "kl_in")

    def advantages(
        self, rewards: NDArray[np.float64], group: NDArray[np.int64]
    ) -> NDArray[np.float64]:
        return relative(rewards, group)
