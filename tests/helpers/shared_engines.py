"""An engine of several processes without Ray, its policy, and what is asked of it."""

from math import inf
from pathlib import Path
from threading import Event, Lock
from typing import Any, ClassVar

import numpy as np
import torch

from helpers.fake_ranks import FakeContext, FakeLogs, SendingRanks
from helpers.fake_workers import Dies, FakeWorkers
from postgrad.cluster.connection import NoPlace
from postgrad.core.errors import RunError
from postgrad.fleet.engines import EngineWorker
from postgrad.fleet.members import EngineLauncher
from postgrad.fleet.remote import RankedWeights
from postgrad.fleet.shared import SharedEngine
from postgrad.rollout.engine import Completion, Request, WeightHandover
from postgrad.rollout.settings import SamplingSettings

LOADING = Lock()  # transformers loads one model at a time in a process


class FakePolicy:
    """A policy at some update with fixed weights."""

    def __init__(self, weights: list[tuple[str, torch.Tensor]]) -> None:
        self.updates = 0
        self.offloads = 0  # how often it left its devices once more
        self.weights = weights

    def free_memory(self) -> None:
        self.offloads += 1

    def hub_weights(self) -> RankedWeights:
        return RankedWeights(SendingRanks(self.weights), "policy")


class Shared:
    """A shared engine over fake processes, and what became of it."""

    def __init__(
        self, recipe: Any, path: str, folder: Path, size: int, dies: dict[int, Dies], **how: Any
    ) -> None:
        """dies: by process, for its first life; `later` for all of its later ones. more: how many
        processes come when there is room for them.
        """
        context = FakeContext.of(recipe)
        more = how.pop("more", 0)
        self.room = room = [Event() for _ in range(size + more)]  # set: its place is there
        for place in room[:size]:
            place.set()
        later: Dies = how.pop("later", lambda method, number: False)
        first: dict[int, Any] = how.pop("first", {})  # recipes of first lives
        lives: dict[int, int] = {}

        class Launcher(EngineLauncher):
            patience: ClassVar[list[tuple[int, float]]] = []  # of each start: its number, seconds

            def has_place(self, number: int) -> bool:
                return room[number].is_set()

            def start(self, number: int, seconds: float) -> Any:
                self.patience.append((number, seconds))
                while not room[number].wait(0.01 if seconds == inf else 0.0):
                    if seconds < inf or self.closed.is_set():
                        raise NoPlace("no machine of the cluster had room for it")
                lives[number] = lives.get(number, 0) + 1
                kills = dies.get(number, later) if lives[number] == 1 else later
                if kills("start", lives[number]):
                    raise RunError("1 of 1 rollout workers did not start")
                worker_recipe = first.get(number, recipe) if lives[number] == 1 else recipe
                worker = EngineWorker(worker_recipe.dump(), context.choices)
                with LOADING:
                    worker.build(path, self.choices, 8, 32, str(folder))
                return FakeWorkers(worker, kills)

        self.logs = FakeLogs()
        self.policy: Any = None
        logs: Any = self.logs
        reservation: Any = None
        self.launcher = Launcher(
            recipe, context.choices, reservation, None, logs, folder, path, 8, 32
        )  # fmt: skip
        members = [self.launcher.start(number, 0.0) for number in range(size)]
        dtype = str(context.choices.rollout_dtype)
        how = {"exact": True, "most": 3, "later": more, **how}
        self.workers = members
        self.engine = SharedEngine(self.launcher, members, dtype, **how)

    def publish(self, weights: list[tuple[str, torch.Tensor]], version: int) -> None:
        policy: Any = FakePolicy(weights)
        policy.updates = version
        self.launcher.policy = policy
        self.engine.load_weights(WeightHandover(policy.hub_weights()), version)


def requests(count: int = 7, samples: int = 5, **sampling: Any) -> list[Request]:
    settings = SamplingSettings(**{"max_new_tokens": 12, **sampling})
    drawn = np.random.default_rng(3)
    return [
        Request(ticket, tuple(range(samples)), drawn.integers(2, 9, 5).astype(np.int32), settings)
        for ticket in range(count)
    ]


def bits(completions: list[Completion]) -> list[Any]:
    return [
        (c.ticket, c.sample, c.turn, c.token_ids.tobytes(), c.logprobs.tobytes(), c.versions)
        for c in completions
    ]


def tokens(completions: list[Completion]) -> list[Any]:
    return [(c.ticket, c.sample, c.token_ids.tolist()) for c in completions]


def dies_in(method: str, number: int) -> Dies:
    return lambda called, before: (called, before) == (method, number)


def new_weights(shared: Any) -> list[tuple[str, torch.Tensor]]:
    return [
        (name, tensor.detach().clone())
        for name, tensor in shared.workers[0]._worker._engine._lm.named_parameters()
    ]


def names(done: list[Completion], left: list[Request]) -> list[tuple[int, int]]:
    return sorted(
        [
            *((c.ticket, c.sample) for c in done),
            *((r.ticket, s) for r in left for s in r.sample_ids),
        ]
    )


EVERY = [(ticket, sample) for ticket in range(7) for sample in range(5)]
