"""GRPO: group-relative policy optimisation (Shao et al. 2024, arXiv:2402.03300)."""

from typing import Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from postgrad.algorithms.policy_gradient import PolicyGradient
from postgrad.ops.advantages import against_others, centred, normalised, step_std


class GRPO(PolicyGradient):
    """A sample's advantage is how many standard deviations it is better than its siblings.

    Each response counts the same (aggregation "sequence"); KL, where there is any, is k3 in the
    loss: both as in the paper. Without `std_norm` it is how much better, in the rewards' own units
    (Dr. GRPO, arXiv:2503.20783); with "batch" in those of the deviation of all rewards of the step
    (Lite PPO, arXiv:2508.08221). With `leave_one_out` a sample is measured by the mean and the
    deviation of the others alone: neither depends on it.
    """

    # False: advantages are not divided by a standard deviation; "batch": by that of the step.
    std_norm: bool | Literal["batch"] = True
    std_eps: float = Field(1e-6, gt=0.0)
    leave_one_out: bool = False  # True: mean and standard deviation are those of the other samples

    def advantages(
        self, rewards: NDArray[np.float64], group: NDArray[np.int64]
    ) -> NDArray[np.float64]:
        of_group = self.std_norm is True
        if self.leave_one_out:
            gain = against_others(rewards, group, self.std_eps if of_group else None)
        elif of_group:
            gain = normalised(rewards, group, self.std_eps)
        else:
            gain = centred(rewards, group)
        return gain / (step_std(rewards) + self.std_eps) if self.std_norm == "batch" else gain
