"""The rollout engine of a run: in this process, or several behind Ray that share the prompts."""

from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import fields

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from postgrad.cluster.workers import Workers
from postgrad.core.errors import RunError
from postgrad.core.handles import Handle
from postgrad.jobs import engines
from postgrad.jobs.choices import Choices
from postgrad.jobs.run import Run
from postgrad.recipe.recipe import Answering
from postgrad.rollout.agreement import Floats, agreed
from postgrad.rollout.engine import Completion, Engine, EngineStats, Request
from postgrad.rollout.weights import portions

WORKER = "postgrad.jobs.ranks.engine_worker:EngineWorker"
ROLE = "rollout"
FED_BYTES = 2**26  # of weights in one call
SUMMED = tuple(one.name for one in fields(EngineStats))


def engine(
    run: Run, recipe: Answering, path: str, stack: ExitStack, *, sequences: int, max_len: int
) -> Engine:
    """See jobs.engines.for_run; in the workers that the recipe places, if it does."""
    count = recipe.cluster.engines(recipe.learner.ranks)
    if run.reservation is None or not count:
        return engines.for_run(run, recipe, path, stack, sequences=sequences, max_len=max_len)
    arguments = (recipe.dump(), run.choices)
    workers = Workers(
        "rollout worker", WORKER, arguments, count, recipe.cluster, run.reservation, ROLE
    )
    stack.callback(workers.close)
    run.logs.event("placed", workers.description(), role=ROLE, places=workers.places)
    share = -(-sequences // count)

    def build(number: int) -> Handle[Choices]:
        logs = run.directory.path / f"rollout-{number}"
        return workers.ask(number, "build", path, run.choices, share, max_len, str(logs))

    run.choices = build(0).result()
    for one in [build(number) for number in range(1, count)]:
        one.result()
    run.console.note(f"{count} rollout workers behind Ray")
    assert run.choices.rollout_dtype is not None  # of every job that answers
    return SharedEngine(workers, run.choices.rollout_dtype)


class SharedEngine:
    """An engine of several workers, each with all weights; tickets are dealt in turn.

    What shares a batch in a worker depends on tickets, samples, turns and token counts alone: all
    workers that have something to do are waited for, so that later turns enter at fixed points.
    """

    def __init__(self, workers: Workers, dtype: str) -> None:
        """dtype: what the workers compute in."""
        self.stats = EngineStats()
        self._workers = workers
        self._dtype = dtype
        self._open = [0] * workers.size  # samples that were asked for
        self._seen: list[tuple[float, ...]] = [(0,) * len(SUMMED)] * workers.size

    def submit(self, request: Request) -> None:
        """Engine.submit."""
        number = request.ticket % self._workers.size
        self._workers.ask(number, "submit", request).result()
        self._open[number] += len(request.sample_ids)

    def completed(self) -> list[Completion]:
        """Engine.completed."""
        asked = {
            number: self._workers.ask(number, "completed")
            for number, samples in enumerate(self._open)
            if samples
        }
        found: list[Completion] = []
        spent: list[tuple[float, ...]] = []
        for number, handle in asked.items():
            done, sums = handle.result()
            self._open[number] -= len(done)
            found += done
            before, self._seen[number] = self._seen[number], sums
            spent.append(tuple(np.subtract(sums, before).tolist()))
        self._count(spent)
        return found

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Engine.load_weights: every worker gets all of them, some at a time."""
        loading: Future[None] = self._workers.call("load_weights", version)
        try:
            for some in portions(_on_host(weights), FED_BYTES):
                self._workers.aside("feed", some).result()
            self._workers.aside("feed", None).result()
        except RunError:
            loading.result()  # says what was behind it
            raise
        loading.result()

    def logprobs(self, sequences: Sequence[NDArray[np.int32]], temperature: float) -> list[Floats]:
        """Engine.logprobs, of every worker. Raises RunError where one has other weights."""
        handles = [
            self._workers.ask(number, "logprobs", list(sequences), temperature)
            for number in range(self._workers.size)
        ]
        return agreed([handle.result() for handle in handles], self._dtype, "rollout worker")

    def rest(self) -> None:
        """Engine.rest."""
        self._workers.call("rest").result()

    def _count(self, spent: Sequence[tuple[float, ...]]) -> None:
        """Tokens and steps add up; seconds pass in all workers at once."""
        for place, name in enumerate(SUMMED):
            values = [one[place] for one in spent]
            more = max(values, default=0.0) if name.endswith("_seconds") else sum(values)
            setattr(self.stats, name, getattr(self.stats, name) + more)


def _on_host(weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    return ((name, tensor.detach().cpu()) for name, tensor in weights)
