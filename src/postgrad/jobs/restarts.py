"""Restarts a run that lost a process from its last checkpoint."""

from collections.abc import Callable
from typing import TypeVar

from postgrad.core.errors import RunError, WorkerLost
from postgrad.jobs.checkpoints import store_of
from postgrad.observe.console import Console
from postgrad.observe.run_dir import RunDirectory
from postgrad.observe.sinks import Logs
from postgrad.recipe.recipe import Recipe

T = TypeVar("T")


def with_restarts(
    once: Callable[[int, int], T], recipe: Recipe, directory: RunDirectory, console: Console
) -> T:
    """Calls `once(restarts, steps)` until it returns, and returns its result. restarts: how often
    the run was restarted; steps: how many steps were saved since this call.

    Raises RunError where cluster.max_restarts restarts in a row brought no newer checkpoint.
    """
    store = store_of(recipe, directory)
    first = before = max(store.steps(), default=0)
    restarts = in_a_row = 0
    while True:
        try:
            return once(restarts, before - first)
        except WorkerLost as error:
            step, cause = max(store.steps(), default=0), str(error)
        in_a_row = in_a_row + 1 if step == before else 1
        before = step
        standing = f"the checkpoint of step {step} stands" if step else "nothing was saved yet"
        most = recipe.cluster.max_restarts
        if in_a_row > most:
            raise RunError(
                f"{cause}; {standing}; cluster.max_restarts = {most}: it is not restarted; "
                f"continue with postgrad resume {directory.path}"
            )
        restarts += 1
        text = f"{cause}; {standing}; restart {in_a_row} of {most} (cluster.max_restarts)"
        console.warn(text)
        logs = Logs(directory.path, console.warn)
        logs.event("restarted", text, step=step, restarts=restarts)
        logs.close()
