"""A rollout engine in a process of its own, as the run's first process calls it."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import astuple
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from postgrad.jobs import engines
from postgrad.jobs.choices import Choices
from postgrad.parallel import device as placing
from postgrad.recipe.load import recipe_from_json
from postgrad.recipe.recipe import Answering
from postgrad.rollout.engine import Completion, Engine, Request

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
        """Makes the engine; the choices with its sizes. See jobs.engines.made. What it started, it
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
