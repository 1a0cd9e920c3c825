"""Simulates sampling and learning of a run, on any number of devices, with samples ahead.

The tickets are those of core.cursor.Schedule, the object that a run is driven by. Engines decode
one token of every row in a pass whose time depends on rows and cached tokens; the learner takes a
time proportional to a step's tokens. Each new version of the weights cuts every engine, and what
was under way is prefilled again. Nothing else is modelled: no scores, no evaluations, no saves.

Where engines and learner are `apart`, on devices of their own, engines go on while the learner
learns; else they take turns, as in rollout/source.py. Apart they wait for each other as
rollout/ahead.py does: an engine once it has no sample of the next step, the learner with its
weights until that step's samples have ended. With `free` neither does, as in rollout/free.py.
"""

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache

import numpy as np
from numpy.typing import NDArray

from postgrad.core.cursor import Schedule
from postgrad.core.seeds import uniform

AnswerLengths = Callable[[int, int], int]  # (ticket, sample) -> tokens of its answer


@dataclass(frozen=True, slots=True)
class BatchLoad:
    """What is to be done: the batch of a run, and how long its answers are."""

    groups: int  # of a step
    samples: int  # of a group
    prompt: int  # tokens of each prompt
    lengths: AnswerLengths


@dataclass(frozen=True, slots=True)
class Pace:
    """How fast: seconds of the work of one engine, and of the learner."""

    slots: int  # rows of an engine
    cache_tokens: float  # places of its cache
    decode: Callable[[int, float], float]  # (rows, cached tokens) -> seconds of one pass
    prefill: Callable[[float], float]  # tokens -> seconds
    learn: Callable[[float], float]  # tokens of a step -> seconds
    publish: float  # seconds in which an engine takes new weights and does nothing else


@dataclass(frozen=True, slots=True)
class Simulated:
    """Means over the steps after the first ones, which begin with empty engines."""

    seconds: float  # of a step
    engine_idle: float  # the share of rows of all engines, over the time, that are empty
    empty_rows: float  # the same of the rows of passes: a run's idle/empty_rows_fraction
    # The share of the time in which an engine decodes and prefills nothing, and that in which the
    # learner does not learn: a run's idle/engines_time_fraction and idle/learner_time_fraction.
    engine_waits: float
    learner_idle: float
    publish: float  # the share of the time
    age: float  # mean age of groups in steps, by the version that began them
    oldest: int
    tokens: float  # written in a step
    passes: int  # of all engines, over the whole simulation


@dataclass(slots=True)
class _Row:
    """A sample: in an engine's queue by its ticket and number, in its rows by when it ends."""

    ticket: int
    sample: int
    left: float = field(compare=False)  # tokens
    context: float = field(compare=False)  # tokens that are prefilled before the next one

    def __lt__(self, other: "_Row") -> bool:  # a heap asks millions of times
        if self.ticket == other.ticket:
            return self.sample < other.sample
        return self.ticket < other.ticket


class _Engine:
    """Rows that all advance by one token in a pass. Between two events the passes are alike."""

    def __init__(self, pace: Pace) -> None:
        self._pace = pace
        self.waiting: list[_Row] = []  # a heap
        self._rows: list[tuple[float, _Row]] = []  # a heap by the pass at which each ends
        self._passes = 0.0  # so far
        self._cached = 0.0
        self._at = 0.0  # the time up to which it has worked
        self.waits = False  # for the next weights, with rows or without
        self.full = 0.0  # row seconds
        self.worked = 0.0  # seconds
        self.written = 0.0  # tokens
        self.passes = 0.0

    @property
    def count(self) -> int:
        """How many rows are in use."""
        return len(self._rows)

    def end(self) -> float:
        """When the next sample ends, if nothing else happens; infinity where there is none."""
        if not self._rows or self.waits:
            return math.inf
        return self._at + max(0.0, self._rows[0][0] - self._passes) * self._pass()

    def advance(self, now: float) -> None:
        """Decodes up to the time `now`."""
        if now > self._at:
            if self._rows and not self.waits:
                passes = (now - self._at) / self._pass()
                self._work(passes, now - self._at)
            self._at = now

    def pop(self) -> _Row:
        """The sample that ends now."""
        end, row = heapq.heappop(self._rows)
        self._work(max(0.0, end - self._passes), 0.0)  # what rounding has left of a pass
        self._cached -= row.context
        return row

    def admit(self, now: float) -> None:
        """Gives rows to waiting samples, as far as rows and cache have room, and prefills them."""
        self._at = max(self._at, now)
        prefilled: dict[int, float] = {}
        while self.waiting and len(self._rows) < self._pace.slots:
            if self._rows and self._cached + self.waiting[0].context > self._pace.cache_tokens:
                break
            row = heapq.heappop(self.waiting)
            heapq.heappush(self._rows, (self._passes + row.left, row))
            self._cached += row.context
            prefilled[row.ticket] = max(row.context, prefilled.get(row.ticket, 0.0))
        if prefilled:
            seconds = self._pace.prefill(sum(prefilled.values()))
            self._at += seconds
            self.worked += seconds

    def has(self, ticket: int) -> bool:
        """Whether a sample of this ticket or of one before it is in its rows or its queue."""
        if self.waiting and self.waiting[0].ticket <= ticket:
            return True
        return any(row.ticket <= ticket for _, row in self._rows)

    def cut(self, now: float, seconds: float) -> None:
        """New weights at `now`: all rows wait, with what they have written, to be admitted anew."""
        for end, row in self._rows:
            left = max(0.0, end - self._passes)
            row.context += row.left - left
            row.left = left
            heapq.heappush(self.waiting, row)
        self._rows, self._cached, self.waits = [], 0.0, False
        self._at = max(self._at, now) + seconds

    def _pass(self) -> float:
        return self._pace.decode(len(self._rows), self._cached)

    def _work(self, passes: float, seconds: float) -> None:
        self._passes += passes
        self.passes += passes
        self._cached += passes * len(self._rows)
        self.written += passes * len(self._rows)
        self.full += seconds * len(self._rows)
        self.worked += seconds


@dataclass(frozen=True, slots=True)
class _Mark:
    """Sums from the start to the end of a step."""

    at: float  # seconds
    full: float  # row seconds of all engines
    worked: float  # seconds of all engines
    written: float  # tokens
    passes: float  # of all engines
    learned: float  # seconds


class Simulation:
    """A run of `load` on some engines and a learner."""

    def __init__(
        self,
        load: BatchLoad,
        pace: Pace,
        engines: int,
        staleness: int,
        *,
        apart: bool,
        free: bool = False,
    ) -> None:
        """free: of rollout.schedule. Raises ValueError for `apart` without staleness."""
        if apart and not staleness:
            raise ValueError("engines apart from the learner wait for it without staleness")
        self._load, self._pace, self._apart = load, pace, apart
        self._waits = apart and not free  # engines and learner, for each other
        self._schedule = Schedule(load.groups, staleness)
        self._engines = [_Engine(pace) for _ in range(engines)]
        self._next = 0  # ticket
        self._left: dict[int, int] = {}  # samples of each open ticket that have not ended
        self._events: list[tuple[float, int, int]] = []  # time, engine, number of its event
        self._stamps = [0] * engines
        self._now = 0.0
        self._learning: float | None = None  # until when
        self._marks: list[_Mark] = []  # at the end of each step
        self._learned = 0.0  # seconds
        self._ages: list[int] = []

    def run(self, steps: int, first: int) -> Simulated:
        """The means over the steps from number `first` on, to number `steps`."""
        self._start()
        while len(self._marks) < steps:
            self._begin_step()
            if self._may_publish():
                self._end_step()
                continue
            time, number, stamp = heapq.heappop(self._events)
            if stamp == self._stamps[number]:
                self._end_sample(time, number)
        return self._means(first)

    def _may_publish(self) -> bool:
        """Whether the learner's weights come before anything else happens."""
        if self._learning is None:
            return False
        if self._waits and (not self._schedule.ready or self._same_pass()):
            return False  # the next step's samples end with the weights that they have
        return not self._events or self._learning <= self._events[0][0]

    def _start(self) -> None:
        for ticket in range(self._next, self._next + self._schedule.room):
            self._schedule.start(ticket)
            self._left[ticket] = self._load.samples
            waiting = self._engines[ticket % len(self._engines)].waiting
            for sample in range(self._load.samples):
                left = float(self._load.lengths(ticket, sample))
                heapq.heappush(waiting, _Row(ticket, sample, left, float(self._load.prompt)))
            self._next = ticket + 1
        for number, engine in enumerate(self._engines):
            engine.advance(self._now)
            engine.admit(self._now)
            self._push_end(number)

    def _push_end(self, number: int) -> None:
        """Notes when the engine's next sample ends."""
        self._stamps[number] += 1
        end = self._engines[number].end()
        if end < math.inf:
            heapq.heappush(self._events, (end, number, self._stamps[number]))

    def _end_sample(self, time: float, number: int) -> None:
        self._now = time
        engine = self._engines[number]
        engine.advance(time)
        ticket = engine.pop().ticket
        self._left[ticket] -= 1
        if not self._left[ticket]:
            del self._left[ticket]
            self._schedule.end(ticket)
        self._let_wait(number)
        if not engine.waits:
            engine.admit(time)
        self._push_end(number)

    def _let_wait(self, number: int) -> None:
        """An engine goes on as long as a step waits for it, and ends the pass that it is at."""
        if not self._waits:
            return
        engine, front = self._engines[number], self._schedule.front
        awaited = bool(front) and engine.has(front[-1])
        engine.waits = False
        engine.waits = not awaited and engine.end() > self._now + 1e-9

    def _begin_step(self) -> None:
        """The learner begins where it is free and the next step's groups are there."""
        if self._learning is not None or not self._schedule.ready:
            return
        if (self._waits or not self._apart) and self._same_pass():
            return  # other samples that end in this very pass
        ages = self._schedule.take()
        lengths, prompt = self._load.lengths, self._load.prompt
        tokens = sum(
            prompt + sum(lengths(ticket, sample) for sample in range(self._load.samples))
            for ticket in ages
        )
        seconds = self._pace.learn(float(tokens))
        self._learned += seconds
        self._ages += ages.values()
        self._learning = self._now + seconds
        if self._waits:
            for number, engine in enumerate(self._engines):
                engine.advance(self._now)  # what waited for another one goes on from here
                self._let_wait(number)
                if not engine.waits:
                    engine.admit(self._now)
                self._push_end(number)
        elif not self._apart:  # they take turns: engines are cut before
            for number, engine in enumerate(self._engines):
                engine.advance(self._now)
                engine.cut(self._learning, self._pace.publish)
                self._stamps[number] += 1
            self._events.clear()

    def _same_pass(self) -> bool:
        while self._events and self._events[0][2] != self._stamps[self._events[0][1]]:
            heapq.heappop(self._events)
        return bool(self._events) and self._events[0][0] <= self._now + 1e-9

    def _end_step(self) -> None:
        """The learner has ended a step: its weights are published."""
        assert self._learning is not None
        self._now, self._learning = max(self._now, self._learning), None
        self._schedule.publish()
        if self._apart:
            for engine in self._engines:
                engine.advance(self._now)
                engine.cut(self._now, self._pace.publish)
        self._start()
        self._marks.append(
            _Mark(
                self._now,
                sum(engine.full for engine in self._engines),
                sum(engine.worked for engine in self._engines),
                sum(engine.written for engine in self._engines),
                sum(engine.passes for engine in self._engines),
                self._learned,
            )
        )

    def _means(self, first: int) -> Simulated:
        begin, last = self._marks[first - 1], self._marks[-1]
        steps, seconds = len(self._marks) - first, last.at - begin.at
        engine_seconds = len(self._engines) * seconds
        rows = self._pace.slots * engine_seconds
        written = last.written - begin.written
        slots = self._pace.slots * (last.passes - begin.passes)
        ages = self._ages[first * self._load.groups :]
        return Simulated(
            seconds=seconds / steps,
            engine_idle=max(0.0, 1 - (last.full - begin.full) / rows),
            empty_rows=max(0.0, 1 - written / slots) if slots else 0.0,
            engine_waits=max(0.0, 1 - (last.worked - begin.worked) / engine_seconds),
            learner_idle=max(0.0, 1 - (last.learned - begin.learned) / seconds),
            publish=steps * self._pace.publish / seconds,
            age=sum(ages) / len(ages),
            oldest=max(ages),
            tokens=written / steps,
            passes=round(max(engine.passes for engine in self._engines)),
        )


def drawn_lengths(mean: float, most: int, samples: int) -> AnswerLengths:
    """Log-normal lengths of this mean, cut at `most`, for so many samples of a group. Their
    logarithm has a deviation of 1, and a third of its variance is the prompt's.
    """
    middle = math.log(mean) - 1 / 2

    @cache
    def of_group(ticket: int) -> list[int]:
        normal = _normal(ticket, 1 + samples)
        deviation = math.sqrt(1 / 3) * normal[0] + math.sqrt(2 / 3) * normal[1:]
        lengths = np.exp(middle + deviation)
        return np.clip(np.rint(lengths), 1, most).astype(np.int64).tolist()

    return lambda ticket, sample: of_group(ticket)[sample]


def recorded_lengths(answers: Sequence[Sequence[int]]) -> AnswerLengths:
    """The lengths of recorded groups, over and over. answers: tokens of each sample, by group."""

    def length(ticket: int, sample: int) -> int:
        group = answers[ticket % len(answers)]
        return max(1, group[sample % len(group)])

    return length


def _normal(ticket: int, count: int) -> NDArray[np.float64]:
    """[count] numbers from the standard normal distribution (Box and Muller, 1958)."""
    first, second = (uniform(0, "lengths", ticket, np.arange(count), n) for n in (0, 1))
    return np.sqrt(-2.0 * np.log(1.0 - first)) * np.cos(2.0 * math.pi * second)
