"""Normalises rewards over the run and clips them, before advantages are computed."""

from collections.abc import Mapping
from typing import Any, Literal, Self, cast

import numpy as np
from numpy.typing import NDArray
from pydantic import field_validator, model_validator

from postgrad.algorithms.base import RolloutAlgorithm
from postgrad.core.ragged import Ragged
from postgrad.ops.running import Moments, moments

Floats = NDArray[np.float64]


class RewardScaling(RolloutAlgorithm):
    """R <- clip((R - mean) / std, low, high), with the mean and deviation of all rewards of the run
    so far, this step's among them (Welford 1962). Done before any KL in the reward and before any
    baseline.

    Turn rewards are divided by the same deviation. What the mean and the clip change belongs to no
    turn: it is credited to the sample's last token.
    """

    reward_scaling: Literal["none", "running"] = "none"
    reward_clip: tuple[float, float] | None = None  # [low, high], or one number: +- it; None: off

    @field_validator("reward_clip", mode="before")
    @classmethod
    def _one_number_is_both_bounds(cls, bounds: Any) -> Any:
        if isinstance(bounds, int | float) and not isinstance(bounds, bool):
            return (-float(bounds), float(bounds))
        return tuple(cast(list[Any], bounds)) if isinstance(bounds, list) else bounds

    @model_validator(mode="after")
    def _bounds_are_in_order(self) -> Self:
        if self.reward_clip is not None and not self.reward_clip[0] < self.reward_clip[1]:
            low, high = self.reward_clip
            raise ValueError(
                f"reward_clip = [{low:g}, {high:g}] keeps no reward apart from another: give "
                "[low, high], or one number above 0 for both"
            )
        return self

    def scaled_rewards(
        self, rewards: Floats, turns: Ragged, state: Mapping[str, Any]
    ) -> tuple[Floats, Ragged, Mapping[str, Any], dict[str, float]]:
        """Rewards [S] and turn rewards as advantages read them, the next state, metrics.

        State, where they are scaled: {"rewards": [n, mean, squares]}, the fields of Moments.
        """
        metrics: dict[str, float] = {}
        if self.reward_scaling == "running":
            seen = Moments(*state.get("rewards", ())).merged(moments(rewards))
            rewards, turns = (rewards - seen.mean) / seen.unit, turns.like(turns.values / seen.unit)
            state = {**state, "rewards": list(seen)}
            metrics |= {"reward_scaling/mean": seen.mean, "reward_scaling/std": seen.std}
        if self.reward_clip is not None:
            free, rewards = rewards, rewards.clip(*self.reward_clip)
            metrics["reward_scaling/clipped"] = float((free != rewards).sum() / max(1, len(free)))
        return rewards, turns, state, metrics
