"""The policy moves too far from its reference, or from itself within a step."""

from pydantic import Field

from postgrad.observe.sentinels.base import Look, Seen, Sentinel, SentinelMemory

RL_ONLY = "response_length"  # preferences measure a KL over answers that the policy did not write
REFERENCE = ("kl/token_mean", "policy/kl")
STEP = "policy/kl_old"


class KL(Sentinel):
    """Speaks while for `steps` steps in a row the policy's KL is over `reference` nats a token from
    the reference, or what its ratio is relative to (algorithm.old_logprobs) over `step` nats a
    token from it.
    """

    reference: float = Field(default=1.0, gt=0.0)
    step: float = Field(default=0.5, gt=0.0)
    steps: int = Field(default=3, ge=1)

    def look(self, seen: Seen, before: SentinelMemory) -> Look | None:
        if RL_ONLY not in seen:
            return None
        limits = {
            name: (seen[name], self.step if name == STEP else self.reference)
            for name in (*REFERENCE, STEP)
            if name in seen
        }
        if not limits:
            return None
        over = [name for name, (value, limit) in limits.items() if not value <= limit]
        row = min(self.steps, before.get("row", 0) + 1) if over else 0
        if row < self.steps:
            return Look({"row": row})
        (value, limit), metric = limits[over[0]], over[0]
        start = "itself before the step, or the sampler (algorithm.old_logprobs)"
        where = start if metric == STEP else "its reference"
        return Look(
            {"row": row},
            message=f"the policy drifts away from {where}: {metric} is {value:.3g} nats a token "
            f"(limit {limit:g}) for {row} steps: lower learner.lr, raise algorithm.kl_coef, or "
            "bound the update with algorithm.clip_low, clip_high and learner.max_grad_norm",
        )
