"""Which draws are skipped (the curriculum), and which groups are sampled but not trained on
(filters).
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from postgrad.core.errors import UsageError
from postgrad.core.records import Prompt, ScoredGroup
from postgrad.rollout.settings import TOTAL, CurriculumSettings, RolloutSettings

Reason = Literal["equal", "below", "above", "failed"]

BINS = 5


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


class Curriculum:
    """Decides which draws are skipped. Holds no state of its own: it goes in and comes out."""

    def __init__(self, settings: CurriculumSettings, component: str | None) -> None:
        """component: of the rewards, whose scores count, as judged_scores takes it."""
        self._settings = settings
        self._component = component

    @property
    def active(self) -> bool:
        """Whether the settings ever skip a row."""
        return self._settings.retire_at is not None or self._settings.postpone_at is not None

    def passes_over(self, prompt: Prompt, epoch: int, state: Mapping[str, Any]) -> bool:
        """Whether this draw of a row is settled without sampling."""
        seen = state.get("rows", {}).get(row_key(prompt))
        if seen is None:
            return False
        mean, visited = seen
        settings = self._settings
        if settings.retire_at is not None and mean >= settings.retire_at:
            return not settings.revisit_epochs or epoch - visited <= settings.revisit_epochs
        if settings.postpone_at is not None and mean <= settings.postpone_at:
            return epoch - visited <= settings.postpone_epochs
        return False

    def after(
        self, groups: Sequence[ScoredGroup], epoch_of: Mapping[int, int], state: Mapping[str, Any]
    ) -> Mapping[str, Any]:
        """The state after a step's groups: {"rows": {row_key: [mean score, epoch]}}.

        epoch_of: ticket -> epoch.
        """
        if not self.active:
            return state
        rows = dict(state.get("rows", {}))
        for group in groups:
            scores = judged_scores(group, self._component)
            if len(scores):
                ticket = group.prompt.ticket
                rows[row_key(group.prompt)] = [float(scores.mean()), epoch_of[ticket]]
        return {**state, "rows": rows}

    def metrics(self, state: Mapping[str, Any]) -> dict[str, float]:
        """How many rows are in each fifth of the range of mean scores so far; {} if inactive."""
        if not self.active:
            return {}
        means = [mean for mean, _ in state.get("rows", {}).values()]
        low, high = min(means, default=0.0), max(means, default=0.0)
        width = (high - low) / BINS or 1.0
        bins = [min(BINS - 1, int((mean - low) / width)) for mean in means]
        return {f"curriculum/bin_{i}": float(bins.count(i)) for i in range(BINS)}


def require_told_apart(settings: CurriculumSettings, prompts: Iterable[Prompt]) -> None:
    """Raises UsageError where a curriculum is on and two rows have the same key: those of two
    subsets or splits of one dataset, whose scores it could not tell apart.
    """
    if not Curriculum(settings, None).active:
        return
    questions: dict[str, str] = {}
    for prompt in prompts:
        if questions.setdefault(row_key(prompt), prompt.question) != prompt.question:
            raise UsageError(
                f"rollout.curriculum: [[data.sets]] has two different rows {prompt.row} of "
                f"{prompt.dataset}, from subsets or splits of it, and keeps one score for both: "
                "take one of the sets, write them to files of their own, or leave the curriculum "
                "out"
            )


def row_key(prompt: Prompt) -> str:
    """The row's key in the state, "gsm8k:17"."""
    return f"{prompt.dataset}:{prompt.row}"
