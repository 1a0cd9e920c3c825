"""Runs without weights: a live source, step by step, with what a checkpoint would hold."""

import random
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from helpers.fake_ranks import FakeLogs
from helpers.fake_workers import Dies, FakeWorkers
from helpers.rollouts import Chosen, Numbers, Ticking, Words
from postgrad.core.cursor import Cursor
from postgrad.core.errors import RunError
from postgrad.core.records import Prompt, ScoredGroup
from postgrad.core.seeds import integer
from postgrad.fleet.engines import EngineWorker
from postgrad.fleet.members import EngineLauncher
from postgrad.fleet.shared import SharedEngine
from postgrad.rollout.ahead import OverlappedSource, Progress
from postgrad.rollout.engine import Completion, EngineStats, Request, in_order
from postgrad.rollout.environment import Environments, Observation, Step, at_once
from postgrad.rollout.free import FreeSource, RecordedSchedule
from postgrad.rollout.settings import RolloutSettings
from postgrad.rollout.source import LiveSource, Sampled


class Turns:
    """An environment of `turns` answers; each is told which one it was."""

    deterministic = True
    concurrent = 0
    turn_tokens: Sequence[int] = ()

    def __init__(self, turns: int) -> None:
        self.turns = turns

    def reset(self, prompt: Prompt, sample: int) -> "Turns._Game":
        return self._Game(self.turns)

    class _Game:
        begins = False

        def __init__(self, turns: int) -> None:
            self.left = turns

        def step(self, response: Completion) -> Step:
            self.left -= 1
            question_tokens = np.array([7, self.left], np.int32)
            reward = float(len(response.token_ids))
            return at_once(Observation(question_tokens, not self.left, reward=reward))

        def close(self) -> None:
            self.left = 0


class Dealt:
    """An engine of several ones, which tickets are dealt to: each goes on only while it has an
    awaited sample. Which of them is next is as arbitrary as with processes.
    """

    def __init__(self, members: list[Ticking], order: random.Random, seconds: float = 0.0) -> None:
        """seconds: that a turn lasts at most."""
        self.stats = EngineStats()
        self._members = members
        self.streams = len(members)
        self._order = order
        self._seconds = seconds
        self._open: set[tuple[int, int]] = set()
        self.busy = False  # a thread is in `completed`

    @property
    def version(self) -> int:
        return self._members[0].version

    @version.setter
    def version(self, version: int) -> None:
        assert not self._open  # weights come where nothing is under way
        for member in self._members:
            member.version = version

    def submit(self, request: Request) -> None:
        self._open |= {(request.ticket, sample) for sample in request.sample_ids}
        self._members[request.ticket % len(self._members)].submit(request)

    def completed(self, awaited: Collection[int] | None = None) -> list[Completion]:
        assert not self.busy
        self.busy = True
        time.sleep(self._order.random() * self._seconds)
        waited = {t for t, _ in self._open if awaited is None or t in awaited}
        asked = sorted({ticket % len(self._members) for ticket in waited})
        done = self._members[self._order.choice(asked)].completed() if asked else []
        self._open -= {(c.ticket, c.sample) for c in done}
        self.busy = False
        return done

    def cut(self) -> list[Request]:
        self._open.clear()
        return in_order(request for member in self._members for request in member.cut())


class TickingShared(SharedEngine):
    """A shared engine of processes without weights, each of which rests before its decode steps."""

    def __init__(self, engines: list[Ticking], dies: Dies = lambda method, number: False) -> None:
        """dies: the last process does, once."""
        self.logs = FakeLogs()
        last = len(engines) - 1

        class Worker(EngineWorker):
            def __init__(self, engine: Any) -> None:
                self._engine = engine

        class Launcher(EngineLauncher):
            def start(self, number: int, seconds: float) -> Any:
                raise RunError("it is not started again")

        members: Any = [
            FakeWorkers(Worker(engine), dies if number == last else lambda method, before: False)
            for number, engine in enumerate(engines)
        ]
        nothing: Any = None
        logs: Any = self.logs
        launcher = Launcher(nothing, nothing, nothing, None, logs, nothing, "", 8, 32)
        super().__init__(launcher, members, "float32", exact=True, most=3)
        self._engines = engines

    @property
    def version(self) -> int:
        return self._engines[0].version

    @version.setter
    def version(self, version: int) -> None:
        assert not any(member.open for member in self._members)
        for member, engine in zip(self._members, self._engines, strict=True):
            assert member.workers is None or not engine._open  # weights come where nothing is
            engine.version = version


class Inline:
    """An executor that does everything at once, in the caller's thread."""

    def submit(self, call: Callable[..., Any], *arguments: Any) -> Future[Any]:
        ended: Future[Any] = Future()
        ended.set_result(call(*arguments))
        return ended


@dataclass
class Life:
    """A run without weights: its source, and what a checkpoint would hold."""

    lengths: int  # seed
    staleness: int
    groups: int = 2
    samples: int = 3
    slots: int = 4
    turns: int = 1
    in_flight: bool = True
    rollout: dict[str, Any] = field(default_factory=dict)
    workers: int = 0  # 0: one engine; else so many that tickets are dealt to
    order: random.Random = field(default_factory=lambda: random.Random(0))  # of the workers
    seconds: float = 0.0  # that a turn and a learner's step last at most
    free: bool = False  # engines go as soon as they can
    recorded: RecordedSchedule | None = None  # what is repeated
    dies: Dies = lambda method, number: False  # the last worker of a free engine
    thread: Any = None  # of an overlapped source; None: it is not overlapped
    scores_ahead: bool = True
    cursor: Cursor = field(default_factory=Cursor)
    state: Any = field(default_factory=dict)
    pending: Any = field(default_factory=dict)
    step: int = 0
    schedule: list[Any] = field(default_factory=list)  # lines of schedule.jsonl
    scored: list[tuple[int, int]] = field(default_factory=list)  # (ticket, sample) that was scored

    def __post_init__(self) -> None:
        self.start()

    def length(self, ticket: int, sample: int, turn: int) -> int:
        drawn = integer(self.lengths, "length", ticket, sample, turn)
        return 1 + drawn % (25 if drawn % 5 == 0 else 4)  # a few are long

    def reward(self, ticket: int, sample: int) -> float:
        self.scored.append((ticket, sample))
        return float(integer(self.lengths, "r", ticket, sample) % 2)

    def start(self) -> None:
        """A new process: nothing is left but what a checkpoint holds."""
        self.engine: Any = Ticking(self.length, self.slots)
        if self.workers:
            members = [Ticking(self.length, self.slots) for _ in range(self.workers)]
            self.engine = Dealt(members, self.order, self.seconds)
        if self.free:
            workers = [Ticking(self.length, self.slots, self.rest) for _ in range(self.workers)]
            self.engine = TickingShared(workers, self.dies)
        self.shown: list[int] = []  # samples that ended, as a person sees them
        progress = Progress(self.shown.append)
        live = LiveSource(
            self.engine,
            Numbers(1000),
            Chosen(self.reward),
            seed=0,
            prompts_per_step=self.groups,
            samples_per_prompt=self.samples,
            sampling=RolloutSettings(
                schedule="free" if self.free else "fixed",
                max_new_tokens=30,
                max_staleness=self.staleness,
                in_flight_updates=self.in_flight,
                **self.rollout,
            ),
            tokenizer=Words(),
            environments=Environments({None: Turns(self.turns)}),
            scores_ahead=self.scores_ahead,
            on_done=progress.count,
        )
        self.source: Any = live
        if self.free:
            self.source = FreeSource(live, self.thread, progress, self.engine, self.recorded)
        elif self.thread is not None:
            self.source = OverlappedSource(live, self.thread, progress)
        self.pending = {name: array.copy() for name, array in self.pending.items()}

    def rest(self) -> None:
        """Before a decode step."""
        time.sleep(self.order.random() * self.seconds)

    def next(self) -> Sampled:
        self.engine.version = self.step
        self.step += 1
        sampled = self.source.next(self.step, self.cursor, self.state, self.pending)
        self.cursor, self.state = sampled.cursor, sampled.state
        self.pending, self.ahead = self.paused()
        return sampled

    def paused(self) -> tuple[Any, Any]:
        if self.source.start_ahead():
            time.sleep(self.order.random() * self.seconds)
        paused = self.source.pause()
        self.schedule.append(paused.schedule)
        untimed = {n: v for n, v in paused.metrics.items() if not n.endswith("_seconds")}
        return paused.pending, untimed


def shown(groups: list[ScoredGroup]) -> list[Any]:
    return [
        (g.prompt.ticket, r.sample, r.token_ids.tolist(), r.logprobs.tolist(), r.versions, r.text,
         r.finish_reason, r.answer, r.counts, g.total.tolist(),
         {name: values.tolist() for name, values in r.columns.items()})
        for g in groups for r in g.rollouts
    ]  # fmt: skip
