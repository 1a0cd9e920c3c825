"""The context of a run, for all jobs: recipe, directory, logs, console, checkpoints, phases."""

import os
import signal
import threading
import time
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType

import psutil
import torch
from torch.profiler import record_function

from postgrad.checkpoint.store import CheckpointStore
from postgrad.core.batch import BatchGeometry
from postgrad.core.errors import RunError
from postgrad.core.process import trim_heap
from postgrad.fleet.choices import Choices
from postgrad.fleet.fleet import Fleet
from postgrad.learner.offload import KeptOnDevice
from postgrad.observe.console import Console, Phase
from postgrad.observe.loggers.all import Loggers
from postgrad.observe.run_dir import RunDirectory
from postgrad.observe.sentinels.watch import Sentinels
from postgrad.observe.sinks import Logs
from postgrad.observe.watchdog import Watchdog
from postgrad.parallel.device import empty_cache
from postgrad.recipe.recipe import Recipe
from postgrad.training.estimates import Estimates
from postgrad.training.peaks import Peaks, Resident

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
PATIENCE_SECONDS = 5.0  # of a second signal with an operation that does not return


class Stop(BaseException):
    """Raised in the main thread where the run can stop at once. No Exception, so that no library
    swallows it.
    """


class Stopped(RunError):
    """A signal stopped the run; the message says where it stands."""


class StopSignals:
    """Handles the signals within a `with` block. Outside the main thread it leaves them alone.

    Python runs a handler only between two operations of the main thread, and one operation of torch
    can take seconds. So a thread of its own answers: it reads the numbers of signals from a pipe
    (`signal.set_wakeup_fd`), says what happens now, and ends the process where a second signal is
    not handled within `PATIENCE_SECONDS`.
    """

    def __init__(self, grace_seconds: float, answer: Callable[[str], None]) -> None:
        self.asked = False
        self._grace = grace_seconds
        self._answer = answer  # shows a text to the person who pressed Ctrl-C
        self._held: float | None = None  # since when weights have been moving
        self._lasted: float | None = None  # how long that took the last time
        self._waits = False  # within `waiting`
        self._wait_messages = (
            "",
            "",
        )  # of the last: after Ctrl-C, after another signal
        self._pauses = False  # within `pause`
        self._gives_up = False  # a signal has ended the waiting
        self._before: dict[int, object] = {}
        self._ended = threading.Event()
        self._pipe: tuple[int, int] | None = None
        self._wakeup_before = -1
        self._answering: threading.Thread | None = None

    def __enter__(self) -> "StopSignals":
        if threading.current_thread() is threading.main_thread():
            under_nohup = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
            heard = [number for number in SIGNALS if number != signal.SIGHUP or not under_nohup]
            self._before = {number: signal.signal(number, self._on_signal) for number in heard}
            self._pipe = os.pipe()
            os.set_blocking(self._pipe[1], False)
            self._wakeup_before = signal.set_wakeup_fd(self._pipe[1], warn_on_full_buffer=False)
            self._answering = threading.Thread(target=self._answer_signals, daemon=True)
            self._answering.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        for number, handler in self._before.items():
            signal.signal(number, handler)  # pyright: ignore[reportArgumentType]
        if self._pipe is not None and self._answering is not None:
            signal.set_wakeup_fd(self._wakeup_before)
            os.close(self._pipe[1])  # the thread reads the end of the pipe, and ends
            self._answering.join()
            os.close(self._pipe[0])
            self._pipe = None

    @property
    def held(self) -> bool:
        """True where weights have moved since the last boundary."""
        return self._held is not None

    def hold(self) -> None:
        """To be called before the first update of a step moves the weights."""
        if self._held is None:
            self._held = time.monotonic()

    def release(self) -> None:
        """To be called at a boundary: the step has ended, with evaluation and checkpoint."""
        if self._held is not None:
            self._lasted = time.monotonic() - self._held
        self._held = None

    @contextmanager
    def waiting(self, given_up: str, goes_on: str) -> Generator[None]:
        """Inside, the end of the run waits for room or for a network, with `pause`. Ctrl-C or a
        second signal ends that; another first one asks for what the run does anyway. given_up,
        goes_on: what who sent Ctrl-C, or another signal, is told.
        """
        self._waits, self._wait_messages = True, (given_up, goes_on)
        try:
            yield
        finally:
            self._waits = False

    def pause(self, seconds: float) -> bool:
        """Waits, within `waiting`. False where a signal has ended that."""
        try:
            self._pauses = True
            if not self._gives_up:
                time.sleep(seconds)
            self._pauses = False
        except Stop:  # the handler has set `_pauses` to False
            pass
        return not self._gives_up

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._waits:
            again, self.asked = self.asked, True
            if number == signal.SIGINT or (again and number != signal.SIGHUP):
                self._gives_up = True
                if self._pauses:
                    self._pauses = False  # nothing is raised twice
                    raise Stop
            return
        if self.asked:
            if number == signal.SIGHUP:  # kernel and shell both say that a terminal was closed
                return
            raise KeyboardInterrupt
        self.asked = True
        if self._held is None or self._left() > self._grace:
            raise Stop

    def _answer_signals(self) -> None:
        """Answers each signal of the pipe. Runs in a thread of its own."""
        assert self._pipe is not None
        answered = False
        while byte := os.read(self._pipe[0], 1):
            number = byte[0]
            if number not in self._before or (answered and number == signal.SIGHUP):
                continue
            name = "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name
            if not answered:
                self._answer(f"{name}: {self._plan_with_sizes(number)}")
                answered = True
                continue
            self._answer(f"{name} again: the run stops at once; the last checkpoint is kept")
            if not self._ended.wait(PATIENCE_SECONDS):  # an operation that does not return
                os._exit(1)

    def _plan_with_sizes(self, number: int) -> str:
        """What happens after the first signal, for the person who sent it."""
        if self._waits or self._gives_up:
            return self._wait_messages[number != signal.SIGINT]
        left = self._left()
        if self._held is None:
            return (
                "the run saves the state after the last completed step and stops; a second signal "
                "stops it at once"
            )
        if left <= self._grace:
            return (
                f"this step is estimated to end in {left:.0f} s; then the run saves and stops; a "
                "second signal stops it at once, and the last checkpoint is kept"
            )
        return (
            f"this step is not estimated to end within checkpoint.grace_seconds = {self._grace:g}: "
            "the run stops at once, and the last checkpoint is kept"
        )

    def _left(self) -> float:
        """Seconds until the next boundary, as the last step took; infinity before the first."""
        if self._held is None or self._lasted is None:
            return float("inf")
        return max(0.0, self._lasted - (time.monotonic() - self._held))


@dataclass(slots=True)
class Clock:
    """Seconds and peak memory by phase ("sample") and by part of a phase ("sample/decode")."""

    step: dict[str, float] = field(default_factory=dict[str, float])  # of the current step
    total: dict[str, float] = field(default_factory=dict[str, float])  # of the whole process
    # CPU seconds of all threads, where they were measured
    total_cpu: dict[str, float] = field(default_factory=dict[str, float])
    started: float = field(default_factory=time.perf_counter)
    step_started: float = field(default_factory=time.perf_counter)
    peaks: Peaks = field(default_factory=Peaks)
    # phases and parts under way, outermost first; after an error those that it ended remain
    open: list[str] = field(default_factory=list[str])

    def add(self, name: str, seconds: float) -> None:
        """Count `seconds` of a phase or part."""
        self.step[name] = self.step.get(name, 0.0) + seconds
        self.total[name] = self.total.get(name, 0.0) + seconds

    @contextmanager
    def timed(self, name: str) -> Generator[None]:
        """Times the block as a phase or part, unless it raises. A profiler's trace shows it too."""
        began, cpu = time.perf_counter(), time.process_time()
        self.open.append(name)
        with record_function(name), self.peaks.within(name):
            yield
        self.open.pop()
        self.add(name, time.perf_counter() - began)
        self.total_cpu[name] = self.total_cpu.get(name, 0.0) + time.process_time() - cpu

    def take_step(self) -> dict[str, float]:
        """PHASE_seconds and PHASE/PART_seconds of the step that ends now, and their _memory_bytes
        where those are known. "other_seconds" passed outside of phases: with it they add up to the
        step's elapsed time. The next step starts from zero.
        """
        in_phases = sum(seconds for phase, seconds in self.step.items() if "/" not in phase)
        other = max(0.0, self.step_seconds - in_phases)
        columns = {f"{phase}_seconds": seconds for phase, seconds in self.step.items()}
        self.step, self.step_started = {}, time.perf_counter()
        return columns | {"other_seconds": other} | self.peaks.take_step()

    @property
    def step_seconds(self) -> float:
        """Seconds since the current step began."""
        return time.perf_counter() - self.step_started

    @property
    def seconds(self) -> float:
        """Seconds since this process began with the run."""
        return time.perf_counter() - self.started


@dataclass(slots=True)
class Run:
    """One execution of a recipe in its directory."""

    recipe: Recipe
    directory: RunDirectory
    geometry: BatchGeometry
    choices: Choices  # replaced once the engine's sizes are known
    console: Console
    logs: Logs
    store: CheckpointStore
    sentinels: Sentinels
    watchdog: Watchdog
    stop: StopSignals
    clock: Clock = field(default_factory=Clock)
    estimates: Estimates = field(default_factory=Estimates)
    untried: frozenset[str] = frozenset()  # choices that are planned and not tried: auto_sizes
    loggers: Loggers = field(default_factory=Loggers)  # none but in a run that trains
    peak_bytes: int = 0
    shown: Phase | None = None  # the phase under way
    fleet: Fleet = field(init=False)  # where its models live: set once its logs are open
    rows: int | None = None  # of the training data, once it is read

    @property
    def steps(self) -> int:
        """How many steps the run has."""
        assert self.geometry.steps is not None  # known once the data is read
        return self.geometry.steps

    def count_rows(self, rows: int) -> None:
        """Sets the number of training rows, so that epochs can be counted in steps."""
        self.rows, self.geometry = rows, self.recipe.geometry(rows)
        # Data is read, and no weight is. What this process did before on a GPU may have left memory
        # in torch's cache, which the run is going to use.
        empty_cache(torch.device(self.choices.device))
        self.clock.peaks.set_baseline()

    def free_memory(self, keep: KeptOnDevice = "all") -> None:
        """Where a phase ends, on GPUs: `Fleet.free_memory`."""
        if self.choices.device == "cuda":
            self.fleet.free_memory(keep)

    def trim(self) -> None:
        """Gives back what an update took: else it is measured as what the phases after it take."""
        trim_heap()
        self.free_memory()

    @contextmanager
    def phase(
        self, name: str, total: int | None = None, awaited: Callable[[], str] = str
    ) -> Generator[None]:
        """Times a phase, shows its progress (`advance`) and watches that it does not hang. awaited:
        as of Watchdog.phase.
        """
        with (
            self.clock.timed(name),
            self.watchdog.phase(name, awaited),
            self.console.phase(name, total) as self.shown,
        ):
            yield
        self.shown = None

    def advance(self, n: int = 1) -> None:
        """Advances the progress of the phase under way by `n`."""
        self.watchdog.beat()
        shown = self.shown  # another thread may be the one that advances
        if shown is not None:
            shown.advance(n)

    def count(self, work: str, done: int, total: int | None) -> None:
        """Shows how far a phase is that has no total of its own, as `core.progress` reports it."""
        self.watchdog.beat()
        if self.shown is not None:
            self.shown.count(work, done, total)

    def tell_skipped(self, updates: Iterable[Mapping[str, float]], step: int) -> None:
        """Records updates that were skipped because their gradients overflowed float16. updates:
        metrics of each; step: their step's number.
        """
        for metrics in updates:
            for name, skipped in metrics.items():
                role, _, metric = name.partition("/")
                if metric == "skipped_updates" and skipped:
                    scale = metrics[f"{role}/loss_scale"]
                    self.logs.event(
                        "update_skipped",
                        f"an update of the {role} is skipped: its gradient is not finite in "
                        f"float16 at a loss scale of {scale:g}, which is halved",
                        step=step,
                    )

    def measure_memory(self) -> int:
        """The peak of resident bytes of this process and its verifiers so far."""
        self.peak_bytes = max(self.peak_bytes, resident_bytes())
        return self.peak_bytes


def resident_bytes() -> int:
    """The peak resident bytes of this process plus what its children hold now.

    The kernel keeps the peak of a process, so nothing between two readings is missed; workers that
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
