"""Shapes rewards before advantages are computed: a penalty of length relative to the group, then a
normalisation over the run and a clip.
"""

import math
from collections.abc import Mapping
from typing import Annotated, Any, Literal, NamedTuple, Self, cast

import numpy as np
from numpy.typing import NDArray
from pydantic import BeforeValidator, Field, model_validator

from postgrad.algorithms.base import RolloutAlgorithm
from postgrad.core.ragged import Ragged
from postgrad.core.records import Sequences
from postgrad.ops.advantages import Amount, Floats, relative_penalties
from postgrad.ops.turns import policy_turns

LEAST_STD = 1e-8  # a smaller deviation is rounding


def _both(bounds: Any) -> Any:
    """One number as both bounds."""
    if isinstance(bounds, int | float) and not isinstance(bounds, bool):
        return (-float(bounds), float(bounds))
    return tuple(cast(list[Any], bounds)) if isinstance(bounds, list) else bounds


Bounds = Annotated[tuple[float, float], BeforeValidator(_both)]  # [low, high], or one number: +- it


class Moments(NamedTuple):
    """Of a set of numbers; its fields are JSON values."""

    n: int = 0  # how many numbers
    mean: float = 0.0
    squares: float = 0.0  # sum of squared distances from the mean

    @property
    def std(self) -> float:
        """The sample standard deviation (n - 1); 0 below two numbers."""
        return math.sqrt(self.squares / (self.n - 1)) if self.n > 1 else 0.0

    @property
    def unit(self) -> float:
        """What to divide by when normalising: `std`, or 1 where that is below LEAST_STD."""
        return self.std if self.std > LEAST_STD else 1.0

    def merged(self, other: "Moments") -> "Moments":
        """The moments of the numbers of both together."""
        n = self.n + other.n
        if self.n == 0 or other.n == 0:
            return other if self.n == 0 else self
        apart, share = other.mean - self.mean, other.n / n
        squares = self.squares + other.squares + apart * apart * self.n * share
        return Moments(n, self.mean + apart * share, squares)


def moments(values: NDArray[np.float64]) -> Moments:
    """The moments of one batch. Equal numbers have exactly their value as mean, and squares 0."""
    if not len(values):
        return Moments()
    mean = float(values[0] + (values - values[0]).mean())
    return Moments(len(values), mean, float(np.square(values - mean).sum()))


class ShapedRewards(NamedTuple):
    """Rewards as advantages read them."""

    rewards: Floats  # [S]
    turns: Ragged  # of turns, per token
    state: Mapping[str, Any]  # of the next step
    taken: Floats | None  # [S] the length penalty; None: there is none
    metrics: dict[str, float]


class RewardScaling(RolloutAlgorithm):
    """R <- clip((R - mean) / std, low, high), with the mean and deviation of all rewards of the run
    so far, this step's among them (Welford 1962). Done before any KL in the reward and before any
    baseline.

    Turn rewards are divided by the same deviation. What the mean and the clip change belongs to no
    turn: it is credited to the sample's last token.

    `length_penalty` is taken off before that: coefficient * mean reward of the group * a sample's
    amount / the largest amount in its group, for each amount that it names.
    """

    # "output_tokens", which the policy wrote, "input_tokens", all others of the sample, or "turns"
    # of the policy -> the share of its group's mean reward that the sample with most of it loses.
    length_penalty: Mapping[Amount, Annotated[float, Field(gt=0.0)]] = {}
    reward_scaling: Literal["none", "running"] = "none"
    reward_clip: Bounds | None = None  # [low, high], or one number: +- it; None: off

    @model_validator(mode="after")
    def _bounds_are_in_order(self) -> Self:
        if self.reward_clip is not None and not self.reward_clip[0] < self.reward_clip[1]:
            low, high = self.reward_clip
            raise ValueError(
                f"reward_clip = [{low:g}, {high:g}] keeps no reward apart from another: give "
                "[low, high], or one number above 0 for both"
            )
        return self

    def shaped_rewards(
        self,
        rewards: Floats,
        turns: Ragged,
        sequences: Sequences,
        written: Ragged,
        state: Mapping[str, Any],
    ) -> ShapedRewards:
        """Rewards [S] and turn rewards as advantages read them. written: bool, the tokens of the
        policy.

        State, where rewards are scaled: {"rewards": [n, mean, squares]}, the fields of Moments.
        """
        taken, metrics = None, dict[str, float]()
        if self.length_penalty:
            taken = self._length_penalties(rewards, sequences, written)
            rewards = rewards - taken
            if len(taken):  # a step may have lost all its samples
                metrics["length_penalty/mean"] = float(taken.mean())
        if self.reward_scaling == "running":
            seen = Moments(*state.get("rewards", ())).merged(moments(rewards))
            rewards, turns = (rewards - seen.mean) / seen.unit, turns.like(turns.values / seen.unit)
            state = {**state, "rewards": list(seen)}
            metrics |= {"reward_scaling/mean": seen.mean, "reward_scaling/std": seen.std}
        if self.reward_clip is not None:
            free, rewards = rewards, rewards.clip(*self.reward_clip)
            metrics["reward_scaling/clipped"] = float((free != rewards).sum() / max(1, len(free)))
        return ShapedRewards(rewards, turns, state, taken, metrics)

    def _length_penalties(self, rewards: Floats, sequences: Sequences, written: Ragged) -> Floats:
        output = written.sums().astype(np.float64)
        rows = np.array([turn.row for turn in policy_turns(sequences, written)], np.int64)
        turns = np.bincount(rows, minlength=len(written))
        amounts: dict[Amount, Floats] = {
            "output_tokens": output,
            "input_tokens": written.lengths - output,
            "turns": turns.astype(np.float64),
        }
        return relative_penalties(rewards, amounts, self.length_penalty, sequences.group)
