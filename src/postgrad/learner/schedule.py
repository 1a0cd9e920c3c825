"""The learning rate of an update: a pure function of its number."""

import math

from postgrad.algorithms.base import Algorithm
from postgrad.algorithms.critic import Critic
from postgrad.core.batch import BatchGeometry
from postgrad.learner.settings import LearnerSettings


def horizon(algorithm: Algorithm, geometry: BatchGeometry) -> int | None:
    """Number of updates of the policy, or of another role that a job trains; None while the size of
    the data is unknown. Steps that train the critic alone (critic_warmup_steps) are not counted, or
    the policy's schedule would not reach its end.
    """
    if geometry.total_updates is None:
        return None
    alone = algorithm.critic_warmup_steps if isinstance(algorithm, Critic) else 0
    return max(1, geometry.total_updates - alone * geometry.updates_per_step)


def warmup_updates(settings: LearnerSettings, total_updates: int) -> int:
    """Number of warm-up updates: warmup_updates, or warmup_ratio of all, rounded up."""
    share = settings.warmup_ratio * total_updates
    return settings.warmup_updates or math.ceil(round(share, 6))  # 0.07 * 100 is 7.000000000000001


def learning_rate(settings: LearnerSettings, update: int, total_updates: int) -> float:
    """The learning rate of `update` (from 0) out of `total_updates`.

    Warm-up update u of W uses (u + 1) / W of settings.lr. Then the rate is constant, or falls from
    lr at update W to `min_lr_ratio` of it one update after the last, so that every update of the
    run moves the weights. Later updates keep that rate.
    """
    warmup = warmup_updates(settings, total_updates)
    if update < warmup:
        return settings.lr * (update + 1) / warmup
    if settings.schedule == "constant":
        return settings.lr
    ended = update >= total_updates
    progress = 1.0 if ended else (update - warmup) / (total_updates - warmup)
    if settings.schedule == "linear":
        left = 1.0 - progress
    else:
        left = 0.5 * (1.0 + math.cos(math.pi * progress))
    return settings.lr * (settings.min_lr_ratio + (1.0 - settings.min_lr_ratio) * left)
