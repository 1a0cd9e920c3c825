"""The processes of a shared engine: how each is started, and what it was asked."""

import threading
from collections.abc import Collection, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from postgrad.cluster.connection import Reservation
from postgrad.cluster.workers import Workers
from postgrad.core.errors import RunError, WorkerLost
from postgrad.core.process import Handle
from postgrad.fleet.choices import Choices
from postgrad.fleet.engines import WORKER
from postgrad.fleet.remote import RankedRole, RankedWeights
from postgrad.observe.sinks import Logs
from postgrad.recipe.recipe import Recipe
from postgrad.rollout.engine import Completion, Request
from postgrad.rollout.stats import SHARED, SUMMED, EngineStats, EngineSums, engine_metrics, named

TITLE = "rollout worker"
ROLLOUT = "rollout"  # the role of [cluster] whose places rollout workers take
NOTHING: EngineSums = EngineStats().rows()
TurnAnswer = tuple[list[Completion], EngineSums]  # and the process's sums so far


@dataclass(slots=True)
class EngineSite:
    """Where the processes of a shared engine are started, and what they are started with."""

    recipe: Recipe
    choices: Choices  # gain the sizes of the first engine, which the others take
    reservation: Reservation
    policy: RankedRole | None  # None where nothing is published
    logs: Logs
    folder: Path  # of the run
    path: str  # of the model that the engines begin with
    sequences: int  # of each engine at once
    max_len: int  # tokens of the longest
    published: int | None = None  # updates of the policy when its weights were published
    publisher: int | None = None  # the thread that published them

    def start(self, number: int) -> Workers:
        """A process with an engine of the run's first weights, in its place on the cluster."""
        workers = self.spawn(number)
        self.build(workers, number)
        return workers

    def spawn(self, number: int) -> Workers:
        """A process without its engine."""
        arguments = (self.recipe.dump(), self.choices)
        settings = self.recipe.cluster
        return Workers(TITLE, WORKER, arguments, 1, settings, self.reservation, ROLLOUT, number)

    def build(self, workers: Workers, number: int) -> None:
        """Builds the engine of a process."""
        logs = str(self.folder / f"rollout-{number}")
        sizes = (self.sequences, self.max_len)
        self.choices = workers.call("build", self.path, self.choices, *sizes, logs).result()

    def note_published(self) -> None:
        """The policy's weights of now have been sent to all engines."""
        self.published = None if self.policy is None else self.policy.updates
        self.publisher = threading.get_ident()

    def weights(self) -> RankedWeights | None:
        """The policy's weights as they were published; None where it has learned since, and in
        every other thread than the one that published them, beside which it may be learning.
        """
        policy = self.policy
        if policy is None or threading.get_ident() != self.publisher:
            return None
        if policy.updates != self.published:
            return None
        rollout = self.recipe.rollout_settings
        alone = rollout is not None and rollout.sends_adapter
        return policy.adapter_weights() if alone else policy.hub_weights()


@dataclass(slots=True)
class SharedStats(EngineStats):
    """The sums of all processes of a shared engine, and what each of them did."""

    members: "Sequence[Member]" = ()
    settled: EngineStats = field(default_factory=EngineStats)  # when all were idle last

    def count(self) -> None:
        """Tokens and steps add up; seconds pass in all processes at once."""
        for place, name in enumerate(SUMMED):
            values = [member.spent[0][place] - member.begun[0][place] for member in self.members]
            more = max(values) if name.endswith("_seconds") else sum(values)
            setattr(self, name, getattr(self.settled, name) + more)

    def settle(self) -> None:
        """From now on sums are counted anew: all processes are idle."""
        self.settled = EngineStats(*(getattr(self, name) for name in SUMMED))
        for member in self.members:
            member.begun = member.spent

    def by_engine(self) -> dict[str, float]:
        """What each process did since the last call, "engine/1/...", and each of several vLLM
        engines in it, "engine/1.0/..."; `losses` are of the whole run.
        """
        done: dict[str, dict[str, float]] = {}
        for member in self.members:
            sums, *inside = np.subtract(member.spent, member.counted).tolist()
            member.counted = member.spent
            done[str(member.number)] = named(sums) | {"losses": float(member.losses)}
            for number, row in enumerate(inside):
                done[f"{member.number}.{number}"] = named(row, SHARED)
        return engine_metrics(done)


@dataclass(slots=True)
class Member:
    """One process of a shared engine."""

    number: int
    workers: Workers | None = None  # None while it is started again
    starting: Future[Workers] | None = None
    asked: Handle[TurnAnswer] | None = None  # the turn under way
    waiting: list[Request] = field(default_factory=list[Request])  # for the next turn
    turns: list[list[Request]] = field(default_factory=list[list[Request]])  # since it was idle
    # by ticket and sample: the request that asked for it
    open: dict[tuple[int, int], Request] = field(default_factory=dict[tuple[int, int], Request])
    repeats: bool = True  # its turns can be repeated to the same bits
    absent: bool = False  # it takes no part until it has weights
    lost: int = 0  # how often in a row, without a completion in between
    losses: int = 0  # in the whole run
    sums: EngineSums = NOTHING  # since the process was started
    spent: EngineSums = NOTHING  # of all processes that had this number
    begun: EngineSums = NOTHING  # `spent` when all were idle last
    counted: EngineSums = NOTHING  # `spent` at the last report

    @property
    def serves(self) -> bool:
        return self.workers is not None and not self.absent

    def call(self, method: str, *arguments: object) -> Handle[Any]:
        """The handle of a call; its error is WorkerLost where the process has ended."""
        assert self.workers is not None
        try:
            return self.workers.call(method, *arguments)
        except RunError as error:
            ended: Handle[Any] = Handle()
            ended.set_exception(WorkerLost(str(error)))
            return ended

    def has(self, awaited: Collection[int] | None) -> bool:
        """Whether it has an open sample of these tickets; None: of any."""
        return any(awaited is None or ticket in awaited for ticket, _ in self.open)

    def give(self, request: Request, exact: bool) -> None:
        """Queues a request for the next turn."""
        if not self.open:
            self.turns, self.repeats = [], exact
        self.waiting.append(request)
        self.open |= {(request.ticket, sample): request for sample in request.sample_ids}

    def take_back(self) -> list[Request]:
        """What is left of its requests, to be asked again from their beginning."""
        asked = {id(request): request for request in self.open.values()}
        samples: dict[int, list[int]] = {}
        for (_, sample), request in self.open.items():
            samples.setdefault(id(request), []).append(sample)
        self.open, self.waiting, self.turns = {}, [], []
        return [
            replace(request, sample_ids=tuple(sorted(samples[key])))
            for key, request in asked.items()
        ]

    def cut(self, requests: Sequence[Request]) -> list[Request]:
        """What is still to be asked: `requests` that its engine was cut to, and those that it was
        not asked yet, or lost. Afterwards nothing is open.
        """
        left: list[Request] = []
        for request in requests:
            keys = [(request.ticket, sample) for sample in request.sample_ids]
            if kept := tuple(sample for ticket, sample in keys if (ticket, sample) in self.open):
                left.append(replace(request, sample_ids=kept))
            for key in keys:
                self.open.pop(key, None)
        return left + self.take_back()

    def take(self, completions: Sequence[Completion], sums: EngineSums) -> list[Completion]:
        """The completions that are still open, each of which is taken once."""
        spent = np.array(self.spent) + np.subtract(sums, self.sums)
        self.spent, self.sums = tuple(map(tuple, spent.tolist())), sums
        taken: list[Completion] = []
        for completion in completions:
            key = completion.ticket, completion.sample
            if key in self.open and self.open[key].turn == completion.turn:
                del self.open[key]
                taken.append(completion)
        return taken
