"""A curriculum: rows that were too easy or too hard at their last visit are skipped for a while.

Its memory of a row is run state, the mean score of its last group and the epoch of that visit, so a
resumed run skips the same rows.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from postgrad.core.records import Prompt, ScoredGroup
from postgrad.rollout.filtering import judged_scores
from postgrad.rollout.settings import CurriculumSettings

BINS = 5


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


def row_key(prompt: Prompt) -> str:
    """The row's key in the state, "gsm8k:17"."""
    return f"{prompt.dataset}:{prompt.row}"
