"""Entropy collapse: the policy has stopped exploring."""

import math
from typing import Any, ClassVar

import numpy as np
from pydantic import Field

from postgrad.checkpoint.schema import Strict
from postgrad.core.rollout_batch import RolloutBatch
from postgrad.observe.sentinels.base import Look, Seen, Sentinel, SentinelMemory, mean, measured

KEY, BEST = "sampled_entropy", "best_reward_fraction"
MOST = 0.5  # a task that so many samples solve has no entropy left to keep


class Entropies(Strict):
    """Entropies, in nats a token, of the run's first steps and of the newest ones."""

    first: list[float] = []
    last: list[float] = []


class Entropy(Sentinel):
    """Speaks while the mean entropy of the last `steps` steps is under `share` of that of the run's
    first ones, and less than half of the samples earn the best reward of their step.
    """

    remembers: ClassVar[Any] = Entropies
    share: float = Field(default=0.1, gt=0.0, lt=1.0)
    steps: int = Field(default=5, ge=1, le=256)

    def look(self, seen: Seen, before: SentinelMemory) -> Look | None:
        if not measured(seen, KEY, BEST):
            return None
        first, last = list(before.get("first", ())), list(before.get("last", ()))
        if len(first) < self.steps:
            return Look({"first": [*first, seen[KEY]], "last": []})
        last = [*last, seen[KEY]][-self.steps :]
        after = {"first": first, "last": last}
        start, now = mean(first), mean(last)
        share = now / start if start > 0 else 1.0
        if len(last) < self.steps or share >= self.share or seen[BEST] >= MOST:
            return Look(after, share)
        return Look(
            after,
            share,
            f"entropy has collapsed: {now:.3g} nats a token, {share:.1%} of the {start:.3g} at the "
            f"start (limit {self.share:.0%}), and {seen[BEST]:.0%} of the samples earn the best "
            "reward; answers no longer differ, so the policy does not explore: lower "
            "learner.lr, set algorithm.entropy_coef, or raise algorithm.clip_high",
        )


def sampled_entropy(batch: RolloutBatch, *, greedy: bool = False) -> dict[str, float]:
    """Two metrics of the kept samples: their entropy in nats a token, and the share of them that
    earns the step's highest reward.

    The entropy is the mean -log p of the sampled tokens: an unbiased estimate that costs nothing.
    Where it is not, it is left out: greedy says that sample 0 of each prompt is the most likely.
    NaN where no other sample was kept.
    """
    if not len(batch):
        return {KEY: math.nan, BEST: math.nan}
    written, logprobs = batch.sequences.loss_mask, batch.sampled_logprobs.values
    drawn = (batch.sample > 0) | (not greedy)
    mask = written.values & written.spread(drawn).values
    cost = -float(logprobs.sum(where=mask, dtype=np.float64))
    return {
        KEY: cost / int(mask.sum()) if mask.any() else math.nan,
        BEST: float((batch.rewards == batch.rewards.max()).mean()),
    }
