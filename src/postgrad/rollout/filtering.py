"""Dynamic sampling (DAPO, arXiv:2503.14476): which groups teach nothing and are replaced."""

from typing import Literal

import numpy as np
from numpy.typing import NDArray

from postgrad.core.records import ScoredGroup
from postgrad.rollout.settings import TOTAL, RolloutSettings

Reason = Literal["equal", "below", "above", "failed"]


def judged_scores(group: ScoredGroup, component: str | None) -> NDArray[np.float64]:
    """The scores by which a group is judged: [kept samples], less those where scoring failed.

    component: a name of [[rewards]], or "total" for the shaped reward. None, or a component that
    does not apply to the prompt: the first that does, as in evaluation.
    """
    if component == TOTAL:
        return group.total[group.kept]
    named = None if component is None else group.rewards.get(component)
    scores = (next(iter(group.rewards.values())) if named is None else named)[group.kept]
    return scores[~np.isnan(scores)]


def reason_to_filter(
    group: ScoredGroup, settings: RolloutSettings, component: str | None
) -> Reason | None:
    """Why a group is filtered, or None where it is trained on; component: as of judged_scores.

    "failed": fewer than two samples were kept and scored. "equal": all scores are the same.
    "below": their mean is at most keep_above. "above": it is at least keep_below.
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
