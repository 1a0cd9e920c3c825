"""Which groups teach nothing and are replaced: dynamic sampling (DAPO, arXiv:2503.14476)."""

from typing import Literal

import numpy as np
from numpy.typing import NDArray

from postgrad.core.records import ScoredGroup
from postgrad.rollout.settings import TOTAL, RolloutSettings

Reason = Literal["equal", "below", "above", "failed"]


def judged_scores(group: ScoredGroup, component: str | None) -> NDArray[np.float64]:
    """What says how well a group does: the scores of `component` on its kept samples.

    None, or a component that does not apply to the prompt: the first that does, as in evaluation.
    "total": the shaped reward. Samples on which the component failed are left out.
    """
    if component == TOTAL:
        return group.total[group.kept]
    named = None if component is None else group.rewards.get(component)
    scores = (next(iter(group.rewards.values())) if named is None else named)[group.kept]
    return scores[~np.isnan(scores)]


def reason_to_filter(
    group: ScoredGroup, settings: RolloutSettings, component: str | None
) -> Reason | None:
    """Why a group is filtered, or None where it is trained on; component: see judged_scores.

    "failed": fewer than two samples were kept and scored. "equal": all scores are the same. "below"
    and "above": their mean lies outside keep_above..keep_below.
    """
    scores = judged_scores(group, component)
    if len(scores) < min(2, len(group.rollouts)):
        return "failed"
    mean = float(scores.mean())
    if settings.keep_above is not None and mean <= settings.keep_above:
        return "below"
    if settings.keep_below is not None and mean >= settings.keep_below:
        return "above"
    if len(scores) > 1 and scores.min() == scores.max():
        return "equal"
    return None
