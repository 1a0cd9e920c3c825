"""Checks of [cluster]: whether the processes of a recipe fit where it places them, as far as the
recipe alone can tell. Each yields (place, what is wrong).
"""

from collections.abc import Iterator

from postgrad.cluster.settings import ClusterSettings, RolePlacement
from postgrad.recipe.lines import RecipeProblem
from postgrad.recipe.settings import CommonSections


def placement_problems(recipe: CommonSections, job: str) -> Iterator[RecipeProblem]:
    """Placements that no cluster has room for."""
    settings, ranks = recipe.cluster, recipe.learner.ranks
    if settings.type == "local":
        yield from _unread(settings)
        return
    policy, rollout = settings.policy, settings.rollout
    if policy.gpus not in (None, 0, ranks):
        yield (
            ("cluster", "policy", "gpus"),
            f"{policy.gpus} beside learner.ranks = {ranks}: every rank has one GPU; state one of "
            "the two, or the same number",
        )
    yield from _spread("policy", policy, ranks, f"learner.ranks = {ranks}")
    workers = settings.engines(ranks)
    if not workers:
        return
    if recipe.rollout_settings is None:
        place = ("cluster", "rollout") if rollout else ("cluster", "policy", "colocate")
        yield place, f'job = "{job}" samples nothing: leave it out'
        return
    if policy.colocate is not None:
        yield from _colocated(rollout, workers, ranks)
    elif rollout is not None:
        yield from _spread("rollout", rollout, workers, f"workers = {workers}")
        if rollout.gpus and rollout.gpus % workers:
            yield (
                ("cluster", "rollout", "gpus"),
                f"{rollout.gpus} GPUs cannot be divided evenly over {workers} workers",
            )


def _unread(settings: ClusterSettings) -> Iterator[RecipeProblem]:
    """Placements that a local run would not read."""
    for key in ("policy", "rollout"):
        if getattr(settings, key) != ClusterSettings.model_fields[key].default:
            yield (
                ("cluster", key),
                'with cluster.type = "local" everything runs in one process: --cluster.type ray, '
                "or leave this out",
            )


def _spread(
    role: str, placement: RolePlacement, processes: int, stated: str
) -> Iterator[RecipeProblem]:
    """Processes that do not divide evenly over machines. stated: the key that says how many."""
    if placement.machines and processes % placement.machines:
        yield (
            ("cluster", role, "machines"),
            f"{stated} cannot be divided evenly over {placement.machines} machines",
        )


def _colocated(rollout: RolePlacement | None, workers: int, ranks: int) -> Iterator[RecipeProblem]:
    """Engines on the ranks' devices: how many fit, and keys that are then the ranks'."""
    if workers > ranks:
        yield (
            ("cluster", "rollout", "workers"),
            f'{workers} on the devices of {ranks} ranks (policy.colocate = "rollout"): at most '
            "one on each",
        )
    stated = [key for key in ("gpus", "cpus", "machines") if rollout and getattr(rollout, key)]
    for key in stated:
        yield (
            ("cluster", "rollout", key),
            'is the ranks\', whose devices the engines share (policy.colocate = "rollout"): leave '
            "it out",
        )
