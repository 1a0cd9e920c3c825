"""What a recipe says about sentinels."""

from typing import Literal

from pydantic import Field

from postgrad.core.settings import Settings

Action = Literal["observe", "warn", "stop"]


class SentinelSettings(Settings):
    """Cheap checks that are always on. "observe" records, "warn" also tells, "stop" ends the run.

    mismatch: learner against sampled logprobs of the same tokens, as a mean difference of
    probabilities and a mean of exp|logprob difference|. publish: learner against engine after
    weights were sent, as a mean difference of logprobs, in nats: more than publish_difference, or,
    once the policy has moved by more than publish_noise, more than half of that way. stall: a phase
    without progress.
    """

    mismatch: Action = "warn"
    prob_difference: float = Field(default=0.01, gt=0.0)  # verl: normal below 0.005
    ratio_excess: float = Field(default=1.05, gt=1.0)  # NeMo RL
    publish: Action = "stop"
    publish_difference: float = Field(default=0.05, gt=0.0)  # bfloat16 rounds to about 0.01
    publish_noise: float = Field(default=1e-3, gt=0.0)  # what rounding alone may look like
    stall: Action = "warn"
    stall_seconds: float = Field(default=1800.0, gt=0.0)
