"""The rollout engine of a run: in this process, or several behind Ray that share the prompts."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import astuple, fields
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from postgrad.cluster.workers import Workers
from postgrad.core.errors import RunError
from postgrad.core.handles import Handle
from postgrad.fleet.choices import Choices
from postgrad.parallel import device as placing
from postgrad.recipe.load import recipe_from_json
from postgrad.recipe.recipe import Answering
from postgrad.rollout.agreement import Floats, agreed
from postgrad.rollout.engine import Completion, Engine, EngineStats, Request
from postgrad.rollout.weights import portions
from postgrad.train import engines
from postgrad.train.run import Run

WORKER = "postgrad.train.ranked_engines:EngineWorker"
ROLE = "rollout"
FED_BYTES = 2**26  # of weights in one call
SUMMED = tuple(one.name for one in fields(EngineStats))


def engine(
    run: Run, recipe: Answering, path: str, stack: ExitStack, *, sequences: int, max_len: int
) -> Engine:
    """See train.engines.for_run; in the workers that the recipe places, if it does."""
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


Some = Sequence[tuple[str, Tensor]]


class EngineWorker:
    """recipe: as its dump; choices: what was chosen at the run's start."""

    _engine: Engine

    def __init__(self, recipe: Mapping[str, Any], choices: Choices) -> None:
        loaded = recipe_from_json(dict(recipe))
        assert isinstance(loaded, Answering)  # only those have engines
        self._recipe = loaded
        self._fed: SimpleQueue[Some | None] = SimpleQueue()
        placing.apply(choices.placement)

    def build(
        self, path: str, choices: Choices, sequences: int, max_len: int, logs: str
    ) -> Choices:
        """Makes the engine; the choices with its sizes. See train.engines.made. What it started, it
        ends with this process. logs: a folder of this worker's own, where all machines see it.
        """
        self._engine, found = engines.made(
            self._recipe, path, choices, ExitStack(), sequences=sequences, max_len=max_len,
            logs=Path(logs),
        )  # fmt: skip
        return found

    def submit(self, request: Request) -> None:
        """Engine.submit."""
        self._engine.submit(request)

    def completed(self) -> tuple[list[Completion], tuple[float, ...]]:
        """Engine.completed, and the engine's sums."""
        return self._engine.completed(), astuple(self._engine.stats)

    def feed(self, some: Some | None) -> None:
        """The next weights for `load_weights`, which waits for them; None: that was all."""
        self._fed.put(some)

    def load_weights(self, version: int) -> None:
        """Engine.load_weights, of what is fed."""
        self._engine.load_weights(self._weights(), version)

    def logprobs(
        self, sequences: Sequence[NDArray[np.int32]], temperature: float
    ) -> list[NDArray[np.float32]]:
        """Engine.logprobs."""
        return self._engine.logprobs(sequences, temperature)

    def rest(self) -> None:
        """Engine.rest."""
        self._engine.rest()

    def _weights(self) -> Iterator[tuple[str, Tensor]]:
        while (some := self._fed.get()) is not None:
            yield from some
