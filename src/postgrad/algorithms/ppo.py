"""PPO with a critic: generalised advantages, clipped policy and values (arXiv:1707.06347)."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from postgrad.algorithms.base import Needs
from postgrad.algorithms.critic import Critic
from postgrad.algorithms.policy_gradient import Earned, PolicyGradient, required
from postgrad.core.ragged import Ragged
from postgrad.ops import kl, running
from postgrad.ops.advantages import whitened
from postgrad.ops.gae import gae, token_rewards
from postgrad.ops.weights import Aggregation


class PPO(PolicyGradient, Critic):
    """A critic says what a state is worth, and a token is credited with what it changed.

    KL is charged token by token in the reward (Ouyang et al. 2022, arXiv:2203.02155). Advantages
    are whitened over the step's tokens; the returns that the critic learns are not.
    """

    min_group_size: ClassVar[int] = 1

    gamma: float = Field(1.0, ge=0.0, le=1.0)
    lam: float = Field(0.95, ge=0.0, le=1.0)
    bootstrap_truncated: bool = False
    whiten: bool = True
    whiten_rewards: bool = False
    reward_scaling: Literal["none", "running"] = "none"
    reward_clip: float | None = Field(None, gt=0.0)  # None: off
    kl_in: Literal["loss", "reward"] = "reward"
    kl_estimator: kl.Estimator = "k1"
    aggregation: Aggregation = "token"

    def needs(self) -> Needs:
        return replace(super().needs(), critic=True)

    def advantages(
        self, rewards: NDArray[np.float64], group: NDArray[np.int64]
    ) -> NDArray[np.float64]:
        return rewards

    def token_credit(
        self, earned: Earned, state: Mapping[str, Any]
    ) -> tuple[dict[str, NDArray[np.float64]], Mapping[str, Any], dict[str, float]]:
        """State, where rewards are scaled: {"rewards": [n, mean, squares]}."""
        mask, values = earned.sequences.loss_mask, required(earned.values, "'values'")
        scaled, turns, state, metrics = self._scaled(earned.rewards, earned.turn_rewards, state)
        rewards = token_rewards(scaled, turns, earned.charges, mask)
        if self.whiten_rewards:
            rewards = mask.like(whitened(rewards.values, mask.values))
        cut = earned.truncated & self.bootstrap_truncated
        advantages, returns = gae(rewards, values, mask, self.gamma, self.lam, cut)
        if self.whiten:
            advantages = whitened(advantages, mask.values)
        columns = {"advantages": advantages, "returns": returns, "values": values.values}
        return columns, state, metrics

    def _scaled(
        self, rewards: NDArray[np.float64], turns: Ragged, state: Mapping[str, Any]
    ) -> tuple[NDArray[np.float64], Ragged, Mapping[str, Any], dict[str, float]]:
        """What the mean and the clip take from a reward is taken at its last token."""
        metrics: dict[str, float] = {}
        if self.reward_scaling == "running":
            seen = running.Moments(*state.get("rewards", ())).merged(running.moments(rewards))
            rewards, turns = (rewards - seen.mean) / seen.unit, turns.like(turns.values / seen.unit)
            state = {**state, "rewards": list(seen)}
            metrics |= {"reward_scaling/mean": seen.mean, "reward_scaling/std": seen.std}
        if self.reward_clip is not None:
            free, rewards = rewards, rewards.clip(-self.reward_clip, self.reward_clip)
            metrics["reward_scaling/clipped"] = float((free != rewards).sum() / max(1, len(free)))
        return rewards, turns, state, metrics
