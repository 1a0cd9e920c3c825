"""The learning rate of an update: a pure function of its number."""

import math

from postgrad.learner.settings import LearnerSettings


def rate(settings: LearnerSettings, update: int, total_updates: int) -> float:
    """The rate of `update` (from 0) out of `total_updates`.

    Warm-up update u of W uses (u + 1) / W of the rate. After it the rate is constant or goes down
    to `min_lr_ratio` of it, reached at the last update.
    """
    if update < settings.warmup_updates:
        return settings.lr * (update + 1) / settings.warmup_updates
    if settings.schedule == "constant":
        return settings.lr
    span = total_updates - 1 - settings.warmup_updates
    progress = min(1.0, (update - settings.warmup_updates) / span) if span > 0 else 1.0
    if settings.schedule == "linear":
        left = 1.0 - progress
    else:
        left = 0.5 * (1.0 + math.cos(math.pi * progress))
    return settings.lr * (settings.min_lr_ratio + (1.0 - settings.min_lr_ratio) * left)
