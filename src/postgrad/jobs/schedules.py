"""Jumps of the learning rate where a run is resumed with another schedule, such as a longer one."""

from collections.abc import Iterator, Mapping

from torch import Tensor

from postgrad.learner.optimizer import UPDATES
from postgrad.learner.schedule import horizon, learning_rate
from postgrad.learner.settings import LearnerSettings
from postgrad.recipe.recipe import Recipe, RLRecipe


def jumps(
    before: Recipe, after: Recipe, rows: int | None, tensors: Mapping[str, Mapping[str, Tensor]]
) -> Iterator[str]:
    """A message for each role whose next update has another learning rate than by `before`.

    rows: number of training rows. tensors: the state of all roles by file stem (`Job.tensors`).
    """
    was = _schedules(before, rows)
    for role, (settings, updates) in _schedules(after, rows).items():
        stem = f"{role}.optimizer"
        if was.get(role) in (None, (settings, updates)) or stem not in tensors:  # no critic, say
            continue
        done = int(tensors[stem][UPDATES])
        old_settings, old_updates = was[role]
        old, new = (
            learning_rate(old_settings, done, old_updates),
            learning_rate(settings, done, updates),
        )
        if old != new:
            yield (
                f"{role}: the learning rate jumps at update {done + 1}, from {old:.4g} by the "
                f"schedule of {old_updates} updates to {new:.4g} by that of {updates}"
            )


def _schedules(recipe: Recipe, rows: int | None) -> dict[str, tuple[LearnerSettings, int]]:
    """Learner settings and number of updates of the schedule, by role that may learn."""
    geometry = recipe.geometry(rows)
    updates = horizon(recipe.algorithm, geometry)
    assert updates is not None  # rows are known
    assert geometry.total_updates is not None
    trained = "reward_model" if recipe.job == "reward" else "policy"
    by_role = {trained: (recipe.learner, updates)}
    if isinstance(recipe, RLRecipe):
        by_role["critic"] = (recipe.critic.learner, geometry.total_updates)
    return by_role
