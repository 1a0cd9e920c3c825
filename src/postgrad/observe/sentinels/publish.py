"""Checks that the rollout engine uses the weights that were published to it."""

import math

from pydantic import Field

from postgrad.observe.sentinels.base import Action, Look, Seen, Sentinel, SentinelMemory

DIFFERENCE, MOVED = "sentinel/publish_difference", "sentinel/policy_moved"

# What rounding alone may look like, by format. In bfloat16 engine and learner of a model of 6M
# parameters differed by 0.0017 to 0.0019 on the same weights, and those of a small one with wide
# weights by 0.012 to 0.022, whichever engine it was.
NOISE = {"float32": 1e-3, "bfloat16": 0.05}


class Publish(Sentinel):
    """Speaks where engine and learner give the same probe different logprobs after a publish.

    They may differ by `difference` nats. Once the policy has moved by more than `noise` since the
    engine's last weights, they may differ by at most half of that distance, too: a stale engine is
    a whole distance away, which a fixed limit would miss at small learning rates.
    """

    action: Action = "stop"
    difference: float = Field(default=0.05, gt=0.0)  # nats; bfloat16 rounds to about 0.01
    noise: float | None = Field(default=None, gt=0.0)  # nats of rounding; None: by the dtype

    def for_dtype(self, dtype: str) -> "Publish":
        """A copy with the noise of `dtype`, the narrower one of engine and learner."""
        noise = self.noise if self.noise is not None else NOISE.get(dtype, max(NOISE.values()))
        return self.model_copy(update={"noise": noise})

    def look(self, seen: Seen, before: SentinelMemory) -> Look | None:
        if not {DIFFERENCE, MOVED} <= seen.keys():
            return None
        difference, moved = seen[DIFFERENCE], seen[MOVED]
        stale = moved > (self.noise or NOISE["float32"]) and difference > moved / 2
        if difference <= self.difference and not stale:  # NaN is no agreement
            return Look({})
        if not math.isfinite(difference):
            return Look(
                {},
                message="logprobs of the policy or of the rollout engine are not finite: the "
                "model's weights are damaged, or have diverged; start from others, or go back to a "
                "checkpoint with a lower learner.lr",
            )
        return Look(
            {},
            message="the rollout engine does not have the policy's weights: mean logprob "
            f"difference {difference:.4g} on the same tokens (limit {self.difference:g}), while "
            f"the policy moved by {moved:.4g}; what it samples is another policy's: fix the "
            "engine's load_weights",
        )
