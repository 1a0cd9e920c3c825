"""DAPO: decoupled clip and dynamic sampling (Yu et al. 2025, arXiv:2503.14476)."""

from pydantic import Field

from postgrad.algorithms.grpo import GRPO
from postgrad.ops.losses import Aggregation


class DAPO(GRPO):
    """GRPO with a higher upper clip, so that unlikely tokens can still rise, and a loss in which
    every token of the update counts the same.

    Its other two parts are not in the loss: `rollout.dynamic_sampling` filters and refills groups,
    and the reward `overlong` is a soft penalty for length.
    """

    clip_high: float = Field(0.28, ge=0.0)
    aggregation: Aggregation = "token"
