"""Train-inference mismatch: learner and sampler differ in the logprobs of the same tokens, by their
arithmetic or because the sampler's weights are older.
"""

from pydantic import Field

from postgrad.observe.sentinels.base import Level, Look, Seen, Sentinel, SentinelMemory

DIFFERENCE, RATIO = "sentinel/prob_difference", "sentinel/ratio_excess"
DRIFT = "sentinel/drift"


class Mismatch(Sentinel):
    """Speaks where the probabilities that learner (p) and sampler (p') computed for the same tokens
    differ: mean |p - p'| over `prob_difference` (verl: normal below 0.005), or mean exp|log p - log
    p'| over `ratio_excess` (NeMo RL). Tokens that older weights drew do not count.
    """

    prob_difference: float = Field(default=0.01, gt=0.0)
    ratio_excess: float = Field(default=1.05, gt=1.0)

    def look(self, seen: Seen, before: SentinelMemory) -> Look | None:
        if DIFFERENCE not in seen:
            return None
        difference, ratio = seen[DIFFERENCE], seen[RATIO]
        if difference <= self.prob_difference and ratio <= self.ratio_excess:
            return Look({})  # NaN is no agreement
        return Look(
            {},
            message=f"learner and sampler disagree on the same tokens: mean |p - p'| "
            f"{difference:.4g} (limit {self.prob_difference:g}), mean exp|log p - log p'| "
            f"{ratio:.4g} (limit {self.ratio_excess:g}); compare their dtypes (rollout.dtype), or "
            "set algorithm.correction",
        )


class Staleness(Level):
    """Speaks while the policy has moved so far since older weights drew its samples that mean
    exp|log p - log p'| of those tokens is over `limit` for `steps` steps in a row.
    """

    limit: float = Field(default=1.5, gt=1.0)

    def value(self, seen: Seen) -> float | None:
        return seen.get(DRIFT)

    def tell(self, value: float, seen: Seen) -> str:
        return (
            f"samples of older weights are far from the policy: mean exp|log p - log p'| "
            f"{value:.4g} on their tokens (limit {self.limit:g}) for {self.steps} steps: lower "
            "rollout.max_staleness or learner.lr"
        )
