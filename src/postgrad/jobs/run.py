"""What every job of a run holds: its recipe, directory, logs, console, checkpoints, phases."""

import time
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import psutil
from torch.profiler import record_function

from postgrad.checkpoint.store import CheckpointStore
from postgrad.cluster.reservation import Reservation
from postgrad.core.batch import BatchGeometry
from postgrad.core.handles import Handle
from postgrad.jobs.choices import Choices
from postgrad.jobs.foreseen import Foreseen
from postgrad.jobs.peaks import Peaks, Resident
from postgrad.jobs.stopping import StopSignals
from postgrad.observe.console import Console, Phase
from postgrad.observe.loggers.all import Loggers
from postgrad.observe.run_dir import RunDirectory
from postgrad.observe.sentinels.watch import Sentinels
from postgrad.observe.sinks import Logs
from postgrad.observe.watchdog import Watchdog
from postgrad.parallel.ranks import ALONE, Ranks
from postgrad.recipe.recipe import Recipe


@dataclass(slots=True)
class Clock:
    """Seconds by phase ("sample") and by part of a phase ("sample/decode"): of the step under way,
    and of the whole process. total_cpu: of all threads, where they were measured. peaks: the most
    memory that they held. open: what is under way, outermost first; what was raised stays.
    """

    step: dict[str, float] = field(default_factory=dict[str, float])
    total: dict[str, float] = field(default_factory=dict[str, float])
    total_cpu: dict[str, float] = field(default_factory=dict[str, float])
    started: float = field(default_factory=time.perf_counter)
    peaks: Peaks = field(default_factory=Peaks)
    open: list[str] = field(default_factory=list[str])

    def add(self, name: str, seconds: float) -> None:
        """Count `seconds` of a phase or part."""
        self.step[name] = self.step.get(name, 0.0) + seconds
        self.total[name] = self.total.get(name, 0.0) + seconds

    @contextmanager
    def timed(self, name: str) -> Generator[None]:
        """Counts what happens inside as a phase or part, unless it is raised; a trace shows it."""
        began, cpu = time.perf_counter(), time.process_time()
        self.open.append(name)
        with record_function(name), self.peaks.within(name):
            yield
        self.open.pop()
        self.add(name, time.perf_counter() - began)
        self.total_cpu[name] = self.total_cpu.get(name, 0.0) + time.process_time() - cpu

    def take_step(self) -> dict[str, float]:
        """PHASE_seconds and PHASE/PART_seconds of the step that ends here, and their
        _memory_bytes where those are known.
        """
        columns = {f"{phase}_seconds": seconds for phase, seconds in self.step.items()}
        self.step = {}
        return columns | self.peaks.take_step()

    @property
    def seconds(self) -> float:
        """Since the run's process began with it."""
        return time.perf_counter() - self.started


class RankCalls(Protocol):
    """Calls that go to every rank of a group, in one order; rank 0 answers."""

    def call(self, method: str, *arguments: Any) -> Handle[Any]: ...

    def aside(self, method: str, *arguments: Any) -> Handle[Any]: ...


@dataclass(slots=True)
class Run:
    """One execution of a recipe in its directory. choices may gain the engine's sizes. group: the
    ranks that hold the roles; None where this process does.
    """

    recipe: Recipe
    directory: RunDirectory
    geometry: BatchGeometry
    choices: Choices
    console: Console
    logs: Logs
    store: CheckpointStore
    sentinels: Sentinels
    watchdog: Watchdog
    stop: StopSignals
    clock: Clock = field(default_factory=Clock)
    foreseen: Foreseen = field(default_factory=Foreseen)
    untried: frozenset[str] = frozenset()  # choices that are planned and not tried, jobs.auto_sizes
    loggers: Loggers = field(default_factory=Loggers)  # none but in a run that trains
    peak_bytes: int = 0
    shown: Phase | None = None  # the phase under way
    group: RankCalls | None = None
    reservation: Reservation | None = None  # what a cluster keeps for it
    rows: int | None = None  # of the training data, once it is read

    @property
    def ranks(self) -> Ranks:
        """This process is alone in what it holds itself."""
        return ALONE

    @property
    def steps(self) -> int:
        """How many steps the run has."""
        assert self.geometry.steps is not None  # known once the data is read
        return self.geometry.steps

    def count_rows(self, rows: int) -> None:
        """The training data is read: epochs are steps from here on."""
        self.rows, self.geometry = rows, self.recipe.geometry(rows)

    @contextmanager
    def phase(self, name: str, total: int | None = None) -> Generator[None]:
        """Times a phase, shows its progress (`advance`) and watches that it does not hang."""
        with (
            self.clock.timed(name),
            self.watchdog.phase(name),
            self.console.phase(name, total) as self.shown,
        ):
            yield
        self.shown = None

    def advance(self, n: int = 1) -> None:
        """So much more of the phase under way is done."""
        self.watchdog.beat()
        if self.shown is not None:
            self.shown.advance(n)

    def measure_memory(self) -> int:
        """Bytes that this process and its verifiers hold at their peak so far."""
        self.peak_bytes = max(self.peak_bytes, resident_bytes())
        return self.peak_bytes


def resident_bytes() -> int:
    """The peak of this process plus what its children hold now.

    The kernel keeps the peak of a process, so nothing between two looks is missed; workers that
    run verifiers keep their size.
    """
    import resource

    me = psutil.Process()
    own_peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # the kernel's peak since it was reset, and the one before
    own_peak = max(own_peak * (1 if psutil.MACOS else 1024), Resident.most)
    children = 0
    for child in me.children(recursive=True):
        try:
            children += int(child.memory_info().rss)
        except psutil.NoSuchProcess:  # it ended while we looked
            continue
    return own_peak + children
