"""Which groups teach nothing and are replaced: dynamic sampling (DAPO, arXiv:2503.14476)."""

from typing import Literal

from postgrad.core.records import ScoredGroup
from postgrad.rollout.settings import RolloutSettings

Reason = Literal["equal", "below", "above", "failed"]


def reason_to_filter(group: ScoredGroup, settings: RolloutSettings) -> Reason | None:
    """Why a group is filtered, or None where it is trained on.

    "failed": fewer than two samples were kept. "equal": all rewards are the same. "below" and
    "above": their mean lies outside keep_above..keep_below.
    """
    rewards = group.total[group.kept]
    if len(rewards) < min(2, len(group.rollouts)):
        return "failed"
    mean = float(rewards.mean())
    if settings.keep_above is not None and mean <= settings.keep_above:
        return "below"
    if settings.keep_below is not None and mean >= settings.keep_below:
        return "above"
    if len(rewards) > 1 and rewards.min() == rewards.max():
        return "equal"
    return None
