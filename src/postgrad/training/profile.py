"""`train --profile`: where the time of a step goes, as a table, profile.json and a trace.

Three steps of this process, of which the first warms up. The second is timed and nothing else, so
that its seconds are those of any run; the third is recorded operation by operation, which slows it
down, so that of it only shares count. Looking changes no bit of the run.
"""

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from torch import Tensor
from torch.profiler import profile

from postgrad.checkpoint.state import RunState
from postgrad.core.errors import UsageError
from postgrad.core.files import write_json
from postgrad.evaluation.results import Result
from postgrad.training.loop import Job
from postgrad.training.run import Run

TABLE, TRACE = "profile.json", "trace.json.gz"
TIMED, RECORDED = 2, 3  # steps of this process: the first one warms up
MOST = 10  # operations of a phase that are named
WIDEST = 36  # characters of a name in the table
BACKWARD, OPTIMIZER = "autograd::engine::evaluate_function", "Optimizer.step"
KINDS = {"operations": "operations", "backward": "backward pass", "optimizer": "optimizer"}


class Profiled:
    """A job whose second step is timed and whose third is recorded, both into the run directory."""

    def __init__(self, job: Job, run: Run, state: RunState) -> None:
        """Raises UsageError where the run has less than `RECORDED` steps left from `state`."""
        left = run.steps - state.step
        if left < RECORDED:
            raise UsageError(
                f"--profile needs {RECORDED} steps, one that warms up, one that is timed and one "
                f"that is recorded, and this run has {left} left: raise steps"
            )
        self._job = job
        self._run = run
        self._steps = 0
        self._at = ClockReading()

    def step(self, state: RunState) -> tuple[RunState, dict[str, float]]:
        """A step of the job, profiled where its turn has come."""
        self._steps += 1
        if self._steps == TIMED:
            self._at = ClockReading.of(self._run)
        if self._steps != RECORDED:
            return self._job.step(state)
        timed = {"step": state.step, **self._at.until(ClockReading.of(self._run))}
        before = set(self._run.clock.total)
        with profile() as recorded:
            result = self._job.step(state)
        self._write(timed, recorded, before | set(self._run.clock.total))
        return result

    def _write(self, timed: dict[str, Any], recorded: profile, spans: set[str]) -> None:
        run = self._run
        folder = run.directory.path
        recorded.export_chrome_trace(str(folder / TRACE))
        events = [_event(event) for event in cast(Any, recorded.events())]
        phases = summary(events, spans)
        choices = {"device": run.choices.device, "threads": run.choices.threads}
        choices |= {"dtype": run.choices.dtype, "rollout_dtype": run.choices.rollout_dtype}
        tables = {"timed": timed, "recorded": {"step": timed["step"] + 1, "phases": phases}}
        write_json(folder / TABLE, {**choices, **tables, "trace": TRACE})
        columns = ("", "seconds", "share", "CPU seconds")
        run.console.table(f"step {timed['step']}, timed", columns, time_rows(timed))
        columns = ("", "share of the phase", "calls")
        title = f"step {timed['step'] + 1}, recorded (slower): its operations"
        run.console.table(title, columns, operation_rows(phases))
        run.console.note(f"{folder / TABLE} has both tables; {TRACE} beside it is for Perfetto")

    def evaluate(self) -> list[Result]:
        return self._job.evaluate()

    def tensors(self) -> dict[str, Mapping[str, Tensor]]:
        return self._job.tensors()


@dataclass(frozen=True, slots=True)
class ClockReading:
    """The clocks of a run at one moment, all in seconds."""

    wall: float = 0.0  # time.perf_counter()
    cpu: float = 0.0  # of all threads
    # spent so far by phase ("train") and part ("train/update")
    seconds: Mapping[str, float] = field(default_factory=dict[str, float])
    cpu_seconds: Mapping[str, float] = field(default_factory=dict[str, float])

    @classmethod
    def of(cls, run: Run) -> "ClockReading":
        """The clocks of `run` as they stand now."""
        clock = run.clock
        return cls(
            time.perf_counter(), time.process_time(), dict(clock.total), dict(clock.total_cpu)
        )

    def until(self, later: "ClockReading") -> dict[str, Any]:
        """The seconds between two readings, in all and by phase, as JSON values. Time that is in no
        phase is the phase "other".
        """
        wall, cpu = later.wall - self.wall, later.cpu - self.cpu
        phases: dict[str, dict[str, float]] = {}
        for name, seconds in later.seconds.items():
            spent = seconds - self.seconds.get(name, 0.0)
            if spent <= 0.0:
                continue
            phases[name] = {"seconds": spent}
            if name in later.cpu_seconds:
                used = later.cpu_seconds[name] - self.cpu_seconds.get(name, 0.0)
                phases[name]["cpu_seconds"] = used
        outermost = [times for name, times in phases.items() if "/" not in name]
        phases["other"] = {
            "seconds": max(0.0, wall - sum(times["seconds"] for times in outermost)),
            "cpu_seconds": max(0.0, cpu - sum(times["cpu_seconds"] for times in outermost)),
        }
        names = sorted(phases, key=lambda name: _place(name, list(phases)))
        return {
            "seconds": wall,
            "cpu_seconds": cpu,
            "phases": {name: phases[name] for name in names},
        }


def _place(name: str, names: list[str]) -> tuple[int, int]:
    """A sorting key: phases in the order in which they ended, each before its parts."""
    phase = name.partition("/")[0]
    return names.index(phase), (1 + names.index(name)) * ("/" in name)


@dataclass(frozen=True, slots=True)
class Event:
    """An event of torch's profiler. All times are in microseconds."""

    name: str  # "aten::mm", or a phase such as "train"
    start: float
    end: float
    self_time: float  # CPU time without that of the events inside it
    device: float = 0.0  # time of its kernels on an accelerator
    within: tuple[str, ...] = ()  # names of the events around it, the innermost first


def _event(recorded: Any) -> Event:
    within: list[str] = []
    parent = recorded.cpu_parent
    while parent is not None:
        within.append(parent.name)
        parent = parent.cpu_parent
    span = recorded.time_range
    device = float(recorded.self_device_time_total)
    return Event(
        recorded.name, span.start, span.end, recorded.self_cpu_time_total, device, tuple(within)
    )


def summary(events: Iterable[Event], spans: set[str]) -> dict[str, dict[str, Any]]:
    """By phase: seconds, the shares of `KINDS` and of time outside all operations (Python,
    waiting), and the operations with the longest time of their own.

    spans: the names of phases and parts among the events. Shares are of the phase's seconds.
    """
    events = list(events)
    stretches: dict[str, list[Event]] = {}  # a step may come to a phase several times
    for event in sorted(events, key=lambda event: event.start):
        if event.name in spans and "/" not in event.name:
            stretches.setdefault(event.name, []).append(event)
    by_phase: dict[str, dict[str, Any]] = {}
    for name, times in stretches.items():
        inside = [e for e in events if any(at.start <= e.start < at.end for at in times)]
        length = sum(at.end - at.start for at in times)
        kinds = dict.fromkeys((*KINDS, "outside"), 0.0)
        for event in inside:
            kinds["outside" if event.name in spans else _kind(event)] += event.self_time / length
        by_phase[name] = {
            "seconds": length / 1e6,
            "shares": kinds,
            "operations": _longest([event for event in inside if event.name not in spans], length),
        }
    return by_phase


def _longest(events: Sequence[Event], length: float) -> list[dict[str, Any]]:
    """The `MOST` operations with the longest time of their own in a phase of `length` microseconds;
    the time on the accelerator decides where one was at work.
    """
    named: dict[str, list[Event]] = {}
    for event in events:
        named.setdefault(event.name, []).append(event)
    operations = [
        {
            "name": name,
            "calls": len(calls),
            "share": sum(event.self_time for event in calls) / length,
            "seconds": sum(event.self_time for event in calls) / 1e6,
            "device_seconds": sum(event.device for event in calls) / 1e6,
        }
        for name, calls in named.items()
    ]
    by = "device_seconds" if any(event.device for event in events) else "seconds"
    return sorted(operations, key=lambda operation: operation[by], reverse=True)[:MOST]


def _kind(event: Event) -> str:
    for name in (event.name, *event.within):
        if name.startswith(BACKWARD):
            return "backward"
        if name.startswith(OPTIMIZER):
            return "optimizer"
    return "operations"


def time_rows(timed: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """The table of the timed step: a row for each phase and, below it, for each of its parts."""
    rows: list[tuple[str, ...]] = []
    for name, times in timed["phases"].items():
        phase, _, part = name.rpartition("/")
        label = f"  {part}" if phase else part
        cpu = f"{times['cpu_seconds']:.3f}" if "cpu_seconds" in times else ""
        share = times["seconds"] / timed["seconds"]
        rows.append((label, f"{times['seconds']:.3f}", f"{share:.1%}", cpu))
    rows.append(("step", f"{timed['seconds']:.3f}", "", f"{timed['cpu_seconds']:.3f}"))
    return rows


def operation_rows(phases: Mapping[str, Mapping[str, Any]]) -> list[tuple[str, ...]]:
    """The table of the recorded step: for each phase the shares by kind, then its operations."""
    rows: list[tuple[str, ...]] = []
    for name, phase in phases.items():
        rows.append((name, "", ""))
        for kind, label in {**KINDS, "outside": "Python and waiting"}.items():
            if phase["shares"][kind] >= 0.001:
                rows.append((f"  {label}", f"{phase['shares'][kind]:.1%}", ""))
        for operation in phase["operations"]:
            if operation["share"] >= 0.01:
                called = operation["name"].removeprefix("aten::").removeprefix(f"{BACKWARD}: ")
                rows.append(
                    (f"    {called[:WIDEST]}", f"{operation['share']:.1%}", str(operation["calls"]))
                )
    return rows
