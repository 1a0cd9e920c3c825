"""A run's processes behind Ray: what it needs, and how they come up."""

from contextlib import ExitStack

from postgrad.cluster import connection
from postgrad.cluster.connection import Reservation
from postgrad.cluster.placing import RoleRequest, role_request
from postgrad.cluster.workers import POLICY, RankGroup
from postgrad.core.errors import RunError, UsageError
from postgrad.recipe.recipe import Answering, Recipe
from postgrad.train.ranked_engines import ROLE
from postgrad.train.run import Run

WORKER = "postgrad.fleet.worker:RankWorker"


def join(run: Run, stack: ExitStack, *, again: bool = False) -> None:
    """Starts the run's ranks where its recipe wants a cluster. again: after a process was lost, so
    that a machine is waited for that may come back.

    Raises UsageError where the placement is impossible, RunError where they do not come up.
    """
    recipe, choices = run.recipe, run.choices
    settings, ranks = recipe.cluster, recipe.learner.ranks
    if settings.type == "local":
        return
    if connection.start(settings):  # who calls us may be in a cluster of their own
        stack.callback(connection.stop)
    wants = wants_of(recipe, choices.device)
    patient = again or settings.address is not None  # others may still be on their way
    try:
        run.reservation = Reservation(wants, settings.start_seconds, patient=patient)
    except UsageError as error:
        if again:  # it did run
            raise RunError(str(error)) from error
        raise
    stack.callback(run.reservation.close)
    arguments = (recipe.dump(), choices)
    made = RankGroup(WORKER, arguments, ranks, choices.device, settings, run.reservation)
    stack.callback(made.close)
    run.group = made
    run.logs.event("placed", made.description(), role=POLICY, places=made.places)
    run.console.note(f"{ranks} ranks, {recipe.learner.sharding} sharding, behind Ray")


def wants_of(recipe: Recipe, device: str) -> list[RoleRequest]:
    """What the recipe's processes ask of a cluster. device: "cpu" or "cuda". Raises UsageError for
    a placement that does not suit it.
    """
    settings, ranks = recipe.cluster, recipe.learner.ranks
    found = [role_request(POLICY, f"learner.ranks = {ranks}", ranks, settings.policy, device)]
    count = settings.engines(ranks)
    if isinstance(recipe, Answering) and recipe.samples_answers and count:
        key, inside = f"cluster.rollout.workers = {count}", settings.policy.colocate and POLICY
        place = settings.rollout or settings.policy
        engine = recipe.rollout.vllm
        gpus = engine.tensor_parallel * engine.engines if recipe.rollout.type == "vllm" else 1
        found.append(role_request(ROLE, key, count, place, device, inside, gpus))
    return found
