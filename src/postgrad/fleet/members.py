"""The processes of a shared engine: how each is started, what it was asked, who takes part."""

import threading
from collections.abc import Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from math import inf
from pathlib import Path
from typing import Any

import numpy as np

from postgrad.cluster.connection import NoPlace, Reservation
from postgrad.cluster.workers import Workers
from postgrad.core.errors import RunError, WorkerLost
from postgrad.core.process import Handle
from postgrad.fleet.choices import Choices
from postgrad.fleet.engines import WORKER, image_folders
from postgrad.fleet.remote import RankedRole, RankedWeights
from postgrad.observe.sinks import Logs
from postgrad.recipe.recipe import Recipe
from postgrad.rollout.engine import Completion, Request
from postgrad.rollout.stats import SHARED, SUMMED, EngineStats, EngineSums, engine_metrics, named

TITLE = "rollout worker"
ROLLOUT = "rollout"  # the role of [cluster] whose places rollout workers take
NO_WORK: EngineSums = EngineStats().rows()  # of an engine that has done nothing
TurnAnswer = tuple[list[Completion], EngineSums]  # and the process's sums so far


@dataclass(slots=True)
class EngineLauncher:
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
    closed: threading.Event = field(default_factory=threading.Event)  # nobody needs engines

    def start(self, number: int, seconds: float) -> Workers:
        """A process with an engine of the run's first weights, in its place on the cluster. Raises
        NoPlace where no machine has room for it within so many seconds.
        """
        self.reservation.wait_for(ROLLOUT, number, seconds, self.closed)
        workers = self.spawn(number)
        self.build(workers, number)
        return workers

    def has_place(self, number: int) -> bool:
        """Whether the place of a process is on a machine that is up."""
        return self.reservation.has_place(ROLLOUT, number)

    def spawn(self, number: int) -> Workers:
        """A process without its engine."""
        arguments = (self.recipe.dump(), self.choices)
        settings = self.recipe.cluster
        return Workers(TITLE, WORKER, arguments, 1, settings, self.reservation, ROLLOUT, number)

    def build(self, workers: Workers, number: int) -> None:
        """Builds the engine of a process."""
        workers.call("keep_images", image_folders(self.recipe, self.folder)).result()
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

    def offload_policy(self) -> None:
        """The policy leaves GPUs on which engines sample: after its weights were sent once more."""
        if self.policy is not None:
            self.policy.free_memory()


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

    @property
    def serving(self) -> int:
        """How many processes sample."""
        return sum(member.serves for member in self.members)

    def by_engine(self) -> dict[str, float]:
        """What each process did since the last call, "engine/1/...", and each of several vLLM
        engines in it, "engine/1.0/..."; `losses` are of the whole run. One that has not come yet
        is left out; "engine/serving" is how many have sampled.
        """
        done: dict[str, dict[str, float]] = {}
        for member in self.members:
            if not member.takes_part and member.spent == NO_WORK:
                continue
            sums, *inside = np.subtract(member.spent, member.counted).tolist()
            member.counted = member.spent
            done[str(member.number)] = named(sums) | {"losses": float(member.losses)}
            for number, row in enumerate(inside):
                done[f"{member.number}.{number}"] = named(row, SHARED)
        serving = sum("losses" in values and values["requests"] > 0 for values in done.values())
        return engine_metrics(done) | {"engine/serving": float(serving)}


@dataclass(slots=True)
class Member:
    """One process of a shared engine."""

    number: int
    workers: Workers | None = None  # None while it is started again
    starting: Future[Workers] | None = None
    asked: Handle[TurnAnswer] | None = None  # the turn under way
    waiting: list[Request] = field(default_factory=list[Request])  # for the next turn
    # Since its engine held nothing of any sample: an idle one may keep what a sample's next turn
    # goes on behind.
    turns: list[list[Request]] = field(default_factory=list[list[Request]])
    idle: bool = True  # what waits came when nothing was open
    # by ticket and sample: the request that asked for it
    open: dict[tuple[int, int], Request] = field(default_factory=dict[tuple[int, int], Request])
    repeats: bool = True  # its turns can be repeated to the same bits
    absent: bool = False  # it samples nothing until it has weights
    takes_part: bool = True  # tickets are dealt to it
    lost: int = 0  # how often in a row, without a completion in between
    losses: int = 0  # in the whole run
    sums: EngineSums = NO_WORK  # since the process was started
    spent: EngineSums = NO_WORK  # of all processes that had this number
    begun: EngineSums = NO_WORK  # `spent` when all were idle last
    counted: EngineSums = NO_WORK  # `spent` at the last report

    @property
    def serves(self) -> bool:
        return self.workers is not None and not self.absent

    @property
    def coming(self) -> bool:
        """Whether it is started again, and tickets may wait for it."""
        return self.starting is not None and self.takes_part

    def call(self, method: str, *arguments: object) -> Handle[Any]:
        """The handle of a call to its process; the error is WorkerLost where that has ended."""
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
        self.idle |= not self.open
        if self.idle and not request.turn:  # then its engine keeps nothing
            self.turns, self.repeats = [], exact
        self.waiting.append(request)
        self.open |= {(request.ticket, sample): request for sample in request.sample_ids}

    def note_asked(self, requests: list[Request]) -> None:
        """Its next turn begins, with what it gets first."""
        self.idle &= not requests
        self.turns.append(requests)

    def note_emptied(self) -> None:
        """Its engine holds nothing any more, unless samples are open."""
        if not self.open:
            self.turns = []

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


class Roster:
    """The processes of a shared engine: which of them tickets are dealt to, how each is started,
    and who takes what a lost one had.
    """

    def __init__(
        self,
        launcher: EngineLauncher,
        first: Sequence[Workers],
        later: int,
        *,
        exact: bool,
        most: int,
    ) -> None:
        """first: the processes that are there. later: how many more come when the cluster has room
        for them; they are numbered behind the first. exact, most: see SharedEngine.
        """
        self.members = [Member(number, workers) for number, workers in enumerate(first)]
        numbers = range(len(first), len(first) + later)
        self.members += [Member(number, takes_part=False) for number in numbers]
        self.stats = SharedStats(members=self.members)
        self._launcher = launcher
        self._exact = exact
        self._most = most
        self._starter = ThreadPoolExecutor(len(self.members), TITLE)
        for member in self.members[len(first) :]:
            self.start(member)

    @property
    def dealt(self) -> list[Member]:
        """Those that tickets are dealt to."""
        return [member for member in self.members if member.takes_part]

    def coming(self) -> list[Future[Workers]]:
        """The starts that tickets wait for."""
        return [m.starting for m in self.members if m.starting is not None and m.takes_part]

    def other_than(self, member: Member, ticket: int) -> Member:
        """Who takes a ticket in a lost one's place: itself where it is alone."""
        others = [other for other in self.members if other.serves]
        others = others or [other for other in self.members if other.coming]
        return others[ticket % len(others)] if others else member

    def ask_again(self, member: Member) -> None:
        """Gives the open samples of a lost process to the others, or to what takes its place."""
        for request in member.take_back():
            self.other_than(member, request.ticket).give(request, self._exact)

    def start(self, member: Member) -> None:
        """Starts a process, beside the others. One that takes no part comes when there is room,
        however long that takes. Samples do not wait for a place where others could write them.
        """
        if not member.takes_part:
            seconds = inf
        elif self.stats.serving:
            seconds = 0.0
        else:
            seconds = self._launcher.recipe.cluster.start_seconds
        member.starting = self._starter.submit(self._started, member.number, seconds)

    def lose(self, member: Member, error: Exception) -> None:
        """A process was lost, or could not be started again. It is started again, or leaves: until
        there is a place for it, or for good. Raises RunError where none is left, and none has come
        that only waits for a publish.
        """
        if member.workers is not None:
            member.workers.close()
        member.workers = member.asked = member.starting = None
        has_no_place = isinstance(error, NoPlace)
        member.lost += 1
        member.losses += not has_no_place
        ends, others = member.lost > self._most, any(m.workers or m.starting for m in self.dealt)
        if member.takes_part and (ends or has_no_place) and not others:
            others = self._call_in()
        if ends and member.takes_part and not others:
            raise RunError(
                f"{error}; cluster.max_restarts = {self._most}: it is not started again, and there "
                f"is no other {TITLE}"
            ) from error
        leaves = ends or (has_no_place and others)
        if leaves:
            member.takes_part = False
        self._tell_lost(member, error, leaves=leaves, ends=ends)
        if leaves and not ends:
            member.lost = 0
        if not ends and not self._launcher.closed.is_set():
            self.start(member)
        if leaves or not member.repeats:
            self.ask_again(member)

    def _call_in(self) -> bool:
        """Those that have come and wait for a publish take part at once, as in a lost one's place;
        so do those that are being started and have a place. False where there is none.
        """
        waiting = [member for member in self.members if not member.takes_part]
        called = [
            m for m in waiting if m.workers or (m.starting and self._launcher.has_place(m.number))
        ]
        for member in called:
            member.takes_part = True
            if member.workers is not None:
                member.starting = Future()
                member.starting.set_result(member.workers)
                member.workers, member.absent = None, False
        return bool(called)

    def tell(self, kind: str, member: Member, text: str, **more: Any) -> None:
        """Logs what became of a process, and how many sample from now on."""
        serving = self.stats.serving
        self._launcher.logs.event(kind, text, engine=member.number, serving=serving, **more)

    def close(self) -> None:
        """Ends all processes, those that are starting too."""
        self._launcher.closed.set()
        self._starter.shutdown(wait=False, cancel_futures=True)
        for member in self.members:
            starting, workers = member.starting, member.workers
            started = starting is not None and starting.done() and not starting.cancelled()
            if starting is not None and started and starting.exception() is None:
                workers = starting.result()
            if workers is not None:
                workers.close()

    def _tell_lost(self, member: Member, error: Exception, *, leaves: bool, ends: bool) -> None:
        plan = "it leaves until the cluster has room for it" if leaves else "it is started again"
        if ends:
            plan = "it leaves the run (cluster.max_restarts)"
        self.tell(
            "engine_left" if leaves else "engine_lost",
            member,
            f"{error}; {plan}; {len(member.open)} samples are asked again",
            samples=len(member.open),
            tickets=sorted({ticket for ticket, _ in member.open}),
            losses=member.losses,
            returns=not ends,
        )

    def _started(self, number: int, seconds: float) -> Workers:
        workers = self._launcher.start(number, seconds)
        if self._launcher.closed.is_set():
            workers.close()
        return workers
