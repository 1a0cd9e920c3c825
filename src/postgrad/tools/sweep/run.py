"""Runs the trials of a sweep as processes of their own, and shows what they reached."""

import os
import signal
import subprocess
import time
from collections import deque
from collections.abc import Generator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from shlex import quote
from types import FrameType
from typing import Any, TextIO, cast

from postgrad.core.errors import RunError, UsageError
from postgrad.core.files import finite, names_in, remove, write_json
from postgrad.core.process import command_of_child, import_path, signals_handled
from postgrad.core.text import how_many
from postgrad.observe.console import Console, Phase
from postgrad.observe.follow import read_object
from postgrad.observe.report.selection import Cap
from postgrad.observe.run_dir import SUMMARY, RunDirectory, claimed
from postgrad.recipe.compare import recipe_hash
from postgrad.recipe.pipeline import Pipeline
from postgrad.recipe.sweep import RECIPES, SWEEP, Sweep, SweptRun, is_sweep, read_sweep
from postgrad.tools.pages import MOST_RUNS, REPORT, report
from postgrad.tools.sweep import seeds
from postgrad.tools.sweep.page import PAGE, write_page
from postgrad.tools.sweep.places import Places, places_for, with_threads
from postgrad.tools.sweep.results import Standing, standing

LOGS = "logs"  # the folder of what the runs printed
OURS = (
    LOGS,
    RECIPES,
    PAGE,
    REPORT,
    SUMMARY,
    SWEEP,
)  # beside the run directories; sweep.json goes last
POLL_SECONDS = 0.1
PAGE_SECONDS = 20.0  # from one page to the next while runs go on
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass(frozen=True, slots=True)
class Command:
    """How the runs of a sweep are started."""

    overwrite: bool = False
    allow_change: Sequence[str] = ()
    at_once: int | None = None  # runs at the same time; None: as the machine has room
    # Where a run prints that goes alone; None: only to its log, as runs do that go together.
    stream: TextIO | None = None


def train_sweep(sweep: Sweep, console: Console, command: Command) -> Standing:
    """Runs every trial that has not finished, and returns what all have reached; also written to
    summary.json and sweep.html. A trial that fails does not end the others.

    Raises UsageError where the directory holds something else, RunError where a signal stopped it.
    """
    _require_place(sweep.path)
    if not command.overwrite:
        sweep = sweep.with_earlier()
    places = places_for(sweep.trials, command.at_once)
    sweep = with_threads(sweep, places.threads)
    sweep.path.mkdir(parents=True, exist_ok=True)
    with claimed(sweep.path):
        if command.overwrite:
            for name in OURS:
                if (sweep.path / name).exists():
                    remove(sweep.path / name)
        sweep.write()
        return _run(sweep, places, console, command)


def resume_sweep(
    path: Path, overrides: Sequence[str], console: Console, command: Command
) -> Standing:
    """Goes on with the sweep in a directory: runs that were stopped or failed go on from their
    newest checkpoints, those that have not begun begin. overrides: for the recipes of all runs.
    """
    return train_sweep(read_sweep(path, overrides), console, command)


def standing_of(path: Path) -> Standing:
    """What the sweep in a directory has reached so far; runs that failed have their causes from
    the last command's summary.
    """
    sweep = read_sweep(path)
    summary = read_object(path / SUMMARY) or {}
    runs = summary.get("runs")
    entries = cast(list[Any], runs) if isinstance(runs, list) else []
    tables = [cast(dict[str, Any], run) for run in entries if isinstance(run, dict)]
    causes = {str(run.get("name")): str(run["cause"]) for run in tables if "cause" in run}
    return standing(sweep, causes)


def show(result: Standing, console: Console) -> None:
    """Prints the table of the runs and the verdict."""
    keys = ", ".join(result.sweep.keys)
    console.table(f"sweep over {keys} in {result.sweep.path}", *result.table())
    if result.settings and result.metric:
        console.table("over the seeds", *seeds.table(result.settings, result.metric.name))
    console.note(result.verdict())
    for run in result.results:
        if run.state == "failed":
            log = result.sweep.path / LOGS / f"{run.trial.name}.log"
            console.error(f"{run.trial.name} failed: {run.cause} (its log: {log})")
    console.note(f"page: {result.sweep.path / PAGE}")


def report_sweep(path: Path, to: Path | None, console: Console, cap: Cap | None) -> dict[str, Any]:
    """Writes the sweep's page, and the report of its best runs side by side, to `to` or to
    report.html beside it; returns what `report` does, and the page's path.
    """
    result = standing_of(path)
    runs = runs_to_show(path, result)
    written = report(runs, to or path / REPORT, console, cap)
    page = write_page(result)
    left_out = len(result.results) - len(runs)
    more = f"; {left_out} further runs are on the first page alone" if left_out else ""
    console.note(f"wrote {page}: the table of all runs{more}")
    return {**written, "sweep": str(page)}


def runs_to_show(path: Path, result: Standing | None = None) -> list[Path]:
    """The run directories of a sweep that a page shows side by side, the best first. Raises
    UsageError where no run has begun.
    """
    result = result or standing_of(path)
    judged = [run.trial.judged for run in result.results]
    begun = [folder for folder in judged if RunDirectory.holds_run(folder)][:MOST_RUNS]
    if not begun:
        raise UsageError(
            f"no run of the sweep {path} has begun: postgrad resume {quote(str(path))}"
        )
    return begun


def _require_place(path: Path) -> None:
    """Raises UsageError where a directory holds a run or other files, not a sweep."""
    if RunDirectory.holds_run(path):
        raise UsageError(
            f"{path} holds a single run: choose another --run_dir for the sweep, whose runs get "
            "directories below it"
        )
    if path.exists() and not path.is_dir():
        raise UsageError(f"run_dir {path} is a file: choose another")
    if path.is_dir() and not is_sweep(path) and (names := sorted(names_in(path))):
        raise UsageError(
            f"run_dir {path} holds other files ({', '.join(names[:3])}): choose a directory of its "
            "own for a sweep"
        )


@dataclass(slots=True)
class _RunProcess:
    """The process of a trial."""

    trial: SweptRun
    place: int
    process: "subprocess.Popen[bytes]"
    log: Path
    logged: int  # bytes of the log before this process
    began: float = field(default_factory=time.monotonic)

    def cause(self) -> str:
        """Why it failed: its error message, else the last line that it printed."""
        with self.log.open("rb") as file:
            file.seek(self.logged)
            lines = file.read().decode(errors="replace").strip().splitlines()
        errors = [n for n, line in enumerate(lines) if line.startswith("postgrad: ")]
        text = " ".join(lines[errors[-1] :] if errors else lines[-1:]).removeprefix("postgrad: ")
        code = self.process.returncode
        ended = f"exit code {code}" if code > 0 else f"signal {signal.Signals(-code).name}"
        return f"{text} ({ended})" if text else ended


class _Stopping:
    """Passes the signals of this process on to the runs, each once."""

    def __init__(self, console: Console) -> None:
        self.asked = False
        self.children: list[_RunProcess] = []
        self._console = console

    def __call__(self, number: int, frame: FrameType | None) -> None:
        for child in self.children:
            if child.process.poll() is None:
                child.process.send_signal(number)
        if number != signal.SIGHUP:  # the terminal is gone
            name = "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name
            count = len(self.children)
            self._console.note(
                f"{name}: no further run starts, {count} under way save and stop; a second signal "
                "stops them at once"
                if not self.asked
                else f"{name} again: {how_many(count, 'run')} under way stop at once"
            )
        self.asked = True


def _run(sweep: Sweep, places: Places, console: Console, command: Command) -> Standing:
    began = time.monotonic()
    waiting = deque(trial for trial in sweep.trials if not _is_finished(trial, command))
    finished = len(sweep.trials) - len(waiting)
    at_once = f"{places.count} at once ({places.reason})" if places.count > 1 else "one by one"
    have = f", {finished} of them have finished" if finished else ""
    console.note(f"sweep: {how_many(len(sweep.trials), 'run')} in {sweep.path}{have}; {at_once}")
    runner = _Runner(sweep, places, console, command)
    with signals_handled(SIGNALS, runner.stopping), ExitStack() as stack:
        if places.count > 1:
            runner.phase = stack.enter_context(console.phase("sweep"))
        try:
            runner.all(waiting)
        finally:
            for child in runner.stopping.children:  # only after an error of this process
                child.process.kill()
    result = standing(sweep, runner.failures, seconds=time.monotonic() - began)
    write_json(sweep.path / SUMMARY, finite(result.to_json()))
    write_page(result)
    if runner.stopping.asked:
        left = sum(run.state != "finished" for run in result.results)
        raise RunError(
            f"stopped: {left} of {len(sweep.trials)} runs have not finished; postgrad resume "
            f"{quote(str(sweep.path))} continues with them"
        )
    return result


class _Runner:
    """Starts trials, as many at a time as there are places, and waits for them."""

    def __init__(self, sweep: Sweep, places: Places, console: Console, command: Command) -> None:
        self.failures: dict[str, str] = {}
        self.stopping = _Stopping(console)
        self.phase: Phase | None = None
        self._sweep = sweep
        self._places = places
        self._console = console
        self._command = command
        self._logs = sweep.path / LOGS
        self._logs.mkdir(exist_ok=True)
        self._page_at = 0.0

    def all(self, waiting: "deque[SweptRun]") -> None:
        """Returns when every trial has ended, or a signal came and those under way have."""
        children, total = self.stopping.children, len(waiting)
        while children or (waiting and not self.stopping.asked):
            while waiting and len(children) < self._places.count and not self.stopping.asked:
                number = total - len(waiting) + 1
                self._start(waiting.popleft(), number, total)
            for child in [child for child in children if child.process.poll() is not None]:
                children.remove(child)
                self._ended(child)
            self._show_progress(total - len(waiting) - len(children), total)
            time.sleep(POLL_SECONDS)

    def _start(self, trial: SweptRun, number: int, total: int) -> None:
        taken = {child.place for child in self.stopping.children}
        place = next(n for n in range(self._places.count) if n not in taken)
        log = self._logs / f"{trial.name}.log"
        self._console.heading(f"{trial.name}: run {number} of {total}")
        words = ["train", str(self._sweep.recipe_of(trial))]
        words += [word for key in self._command.allow_change for word in ("--allow-change", key)]
        if self._command.overwrite:
            words += ["--overwrite", "true"]
        with log.open("ab") as file, ExitStack() as stack:
            alone = self._command.stream if self._places.count == 1 else None
            with suppress(OSError, AttributeError):  # a notebook's stream has no descriptor
                alone = None if alone is None else stack.enter_context(_flushed(alone))
            logged = file.tell()
            process = subprocess.Popen(
                command_of_child(words),
                stdin=subprocess.DEVNULL,
                stdout=file if alone is None else alone.fileno(),
                stderr=file,
                env={**os.environ, **import_path(), **self._places.environment(place)},
                start_new_session=True,  # a terminal's Ctrl-C comes here alone, and is passed on
            )
        self.stopping.children.append(_RunProcess(trial, place, process, log, logged))

    def _ended(self, child: _RunProcess) -> None:
        trial, seconds = child.trial, time.monotonic() - child.began
        if child.process.returncode == 0:
            if self._places.count > 1:
                self._console.note(f"{trial.name} has finished after {seconds:.0f} s")
        elif not self.stopping.asked:
            self.failures[trial.name] = child.cause()
            self._console.warn(f"{trial.name} failed: {self.failures[trial.name]}")

    def _show_progress(self, done: int, total: int) -> None:
        if self.phase is not None:
            self.phase.count("runs finished", done, total)
        if time.monotonic() - self._page_at > PAGE_SECONDS:
            names = [child.trial.name for child in self.stopping.children]
            write_page(standing(self._sweep, self.failures, names))
            self._page_at = time.monotonic()


@contextmanager
def _flushed(stream: TextIO) -> Generator[TextIO]:
    """The stream, flushed, so that what a child prints to its descriptor comes after. Raises
    OSError where it has no descriptor.
    """
    stream.fileno()
    stream.flush()
    yield stream


def _is_finished(trial: SweptRun, command: Command) -> bool:
    """Whether a trial has ended with this very recipe, so that no process has to look. Where this
    is not sure (a pipeline, a commit of the hub) its process finds out.
    """
    if command.overwrite or command.allow_change or isinstance(trial.source, Pipeline):
        return False
    summary = read_object(trial.path / SUMMARY)
    if summary is None or not RunDirectory.holds_run(trial.path):
        return False
    is_same = RunDirectory(trial.path).recipe() == trial.source.dump()
    if not is_same or summary.get("recipe_sha256") != recipe_hash(trial.source):
        return False
    return not trial.source.checkpoint.save_hf or (trial.path / "model" / "config.json").exists()
