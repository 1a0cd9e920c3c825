"""PPO with a critic: generalised advantages, clipped policy and values (arXiv:1707.06347)."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar, Literal, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

from postgrad.algorithms.base import CreditInputs, Needs, required
from postgrad.algorithms.critic import Critic
from postgrad.algorithms.policy_gradient import PolicyGradient
from postgrad.ops import kl
from postgrad.ops.advantages import whitened
from postgrad.ops.gae import gae, token_rewards
from postgrad.ops.losses import Aggregation


class PPO(PolicyGradient, Critic):
    """A critic estimates the value of each state; a token's advantage is how it changed the value.

    KL is charged token by token in the reward (Ouyang et al. 2022, arXiv:2203.02155). Advantages
    are whitened over the step's tokens; the returns that the critic learns are not.
    """

    min_group_size: ClassVar[int] = 1

    gamma: float = Field(1.0, ge=0.0, le=1.0)
    lam: float = Field(0.95, ge=0.0, le=1.0)
    bootstrap_truncated: bool = False  # at the token limit use the last value, not 0
    whiten: bool = True  # advantages
    std_norm: bool = True  # False: whitening subtracts the mean and does not divide by the std
    whiten_rewards: bool = False  # scale token rewards by their deviation, around their mean
    kl_in: Literal["loss", "reward"] = "reward"
    kl_estimator: kl.Estimator = "k1"
    aggregation: Aggregation = "token"

    @model_validator(mode="after")
    def _std_norm_belongs_to_whitening(self) -> Self:
        if not (self.whiten or self.std_norm):
            raise ValueError("std_norm = false is read only where whiten = true: leave it out")
        return self

    def needs(self) -> Needs:
        return replace(super().needs(), critic=True)

    def advantages(
        self, rewards: NDArray[np.float64], group: NDArray[np.int64]
    ) -> NDArray[np.float64]:
        return rewards

    def token_credit(
        self, inputs: CreditInputs, state: Mapping[str, Any]
    ) -> tuple[dict[str, NDArray[np.float64]], Mapping[str, Any], dict[str, float]]:
        mask, values = inputs.sequences.loss_mask, required(inputs.values, "'values'")
        rewards = token_rewards(inputs.rewards, inputs.turn_rewards, inputs.charges, mask)
        if self.whiten_rewards:
            rewards = mask.like(whitened(rewards.values, mask.values, shift_mean=False))
        cut = inputs.truncated & self.bootstrap_truncated
        advantages, returns = gae(rewards, values, mask, self.gamma, self.lam, cut)
        if self.whiten:
            advantages = whitened(advantages, mask.values, std_norm=self.std_norm)
        columns = {"advantages": advantages, "returns": returns, "values": values.values}
        return columns, state, {}
