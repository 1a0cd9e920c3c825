"""Checkpoints of a run: where they are, when one is saved, and what if a save fails."""

import shutil
import sys
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import psutil
import torch
from torch import Tensor

from postgrad.checkpoint.parts import Divided
from postgrad.checkpoint.state import RunState
from postgrad.checkpoint.store import (
    SPARE_BYTES,
    CheckpointStore,
    NoRoom,
    SaveFailed,
    Untidy,
    size_of,
)
from postgrad.core.errors import DiskFull, RunError
from postgrad.core.files import existing
from postgrad.core.text import size_text
from postgrad.observe.run_dir import RunDirectory
from postgrad.recipe.load import recipe_from_json
from postgrad.recipe.recipe import Recipe
from postgrad.training.card import HFCopies
from postgrad.training.mirroring import Uploader
from postgrad.training.run import Run

RETRY_SECONDS = 10.0  # between two attempts of a last save on a full disk
Tensors = Mapping[str, Mapping[str, Tensor]]  # by file stem, then by name


def estimate_disk(run: Run, size: int) -> None:
    """Prints before the run how much disk its checkpoints of `size` bytes take. Raises SaveFailed
    where not even one has room.
    """
    settings = run.recipe.checkpoint
    free = run.store.require_space(size)
    most = settings.most_kept(run.steps) + 1
    always = ", checkpoint.keep_steps" if settings.keep_steps else ""
    if free < size * (most - len(run.store.steps())):
        run.console.warn(
            f"disk: there is no room for {most} checkpoints of {size_text(size)}: lower "
            f"checkpoint.max_ckpt_num{always and ', raise checkpoint.keep_steps'}, or saves will "
            "fail (older checkpoints are kept)"
        )
    run.console.note(
        f"disk: a checkpoint takes {size_text(size)}, and {run.store.root} holds up to {most} of "
        f"them, {size_text(most * size)} (checkpoint.max_ckpt_num{always}, the best one, and one "
        f"that is being written); {size_text(free)} are free"
    )


class Stateful(Protocol):
    """The part of a job that a checkpoint holds."""

    def tensors(self) -> dict[str, Mapping[str, Tensor]]:
        """The state of every role that changes, by file stem."""
        ...


@dataclass(slots=True)
class _Writing:
    """A save under way."""

    step: int
    size: int  # bytes
    behind: bool  # written in a thread while the next steps run
    future: Future[float]  # seconds that writing took
    began: float  # time.perf_counter()
    pause: float | None = None  # seconds that training stood still; None while it still does

    def to_json(self, seconds: float) -> dict[str, Any]:
        """The fields of its event. seconds: that writing took."""
        pause = time.perf_counter() - self.began if self.pause is None else self.pause
        return {
            "step": self.step,
            "behind": self.behind,
            "pause_seconds": round(pause, 4),
            "write_seconds": round(seconds, 4),
            "size_bytes": self.size,
        }


def _copied(tensors: Tensors) -> Tensors:
    return {
        stem: named.copied()
        if isinstance(named, Divided)
        else {name: tensor.detach().to("cpu", copy=True) for name, tensor in named.items()}
        for stem, named in tensors.items()
    }


class Saver:
    """Saves a run's state. state: that the run starts from; it counts as saved unless it is new."""

    def __init__(self, run: Run, job: Stateful, state: RunState) -> None:
        self._run = run
        self._job = job
        self._saved: int | None = state.step or None
        self._at = time.monotonic()
        self._passes = self._passes_of(state)
        self._writer = ThreadPoolExecutor(1, "checkpoint")
        self._writing: _Writing | None = None
        self._warned = False
        settings = run.recipe.checkpoint
        self._copies = HFCopies(run) if settings.save_hf == "each" else None
        self._uploader = Uploader(run, state) if settings.mirror else None

    def due(self, state: RunState) -> bool:
        """True where save_steps, save_minutes or save_epochs ask for a save now."""
        settings = self._run.recipe.checkpoint
        by_steps = bool(settings.save_steps) and state.step % settings.save_steps == 0
        seconds = time.monotonic() - self._at
        by_time = bool(settings.save_minutes) and seconds >= 60 * settings.save_minutes
        return by_steps or by_time or self._passes_of(state) > self._passes

    def _passes_of(self, state: RunState) -> int:
        """How many times save_epochs passes over the training data are settled."""
        every, rows = self._run.recipe.checkpoint.save_epochs, self._run.rows
        return state.cursor.settled // (every * rows) if every and rows else 0

    def save(self, state: RunState, *, best: bool = False, must: bool = False) -> None:
        """Copies the state and writes it behind the next steps, one save at a time.

        Where there is no memory for a copy, or there `must` be a checkpoint, it is written before
        this returns. A failure is warned of and recorded, and the run goes on with its older
        checkpoints, unless there must be one: then it waits for room on a full disk
        (checkpoint.wait_for_room_minutes), and what fails is raised. RunError where the run
        directory is gone.
        """
        run = self._run
        run.directory.require_present()
        began = time.perf_counter()
        run.free_memory()  # what an update left would be measured as what a save takes
        with run.phase("save"):
            self.wait()
            self._at, self._passes = time.monotonic(), self._passes_of(state)
            tensors = self._job.tensors()
            if must:
                self._save_last(state, tensors, best, began)
            elif not self._save_between(state, tensors, best, began):
                return
            if self._copies is not None:
                self._copies.write(state, tensors)

    def _save_last(self, state: RunState, tensors: Tensors, best: bool, began: float) -> None:
        """Writes a checkpoint without which steps are lost. Its failure is raised."""

        def attempt() -> None:
            self._run.directory.require_present()  # who makes room may remove too much
            self._begin(state, tensors, best, began)
            self.wait(must=True)

        ahead = sum(array.nbytes for array in state.pending.values())
        try:
            _with_room(self._run, state.step, size_of(tensors) + ahead + SPARE_BYTES, attempt)
        except (DiskFull, SaveFailed) as error:
            raise self._with_standing(error) from error

    def _save_between(self, state: RunState, tensors: Tensors, best: bool, began: float) -> bool:
        """Writes a checkpoint, behind the next steps where there is memory for a copy. False where
        the logs' disk is full: that is told, and nothing is written.
        """
        behind = self._has_memory(tensors)
        try:
            writing = self._begin(state, tensors, best, began, behind=behind)
        except DiskFull as error:
            self._tell("save_failed", error, state.step)
            return False
        if behind:
            writing.pause = time.perf_counter() - began
        else:
            self.wait()
        return True

    def _begin(
        self, state: RunState, tensors: Tensors, best: bool, began: float, *, behind: bool = False
    ) -> _Writing:
        """Begins to write, a copy if that goes on `behind` the next steps. Raises DiskFull where
        the logs' disk is full.
        """
        kept = self._with_logs(state)
        held = _copied(tensors) if behind else tensors
        future = self._writer.submit(self._write, kept, held, best)
        self._writing = _Writing(state.step, size_of(held), behind, future, began)
        return self._writing

    def _write(self, state: RunState, tensors: Tensors, best: bool) -> float:
        """Saves in the writing thread; returns the seconds that it took."""
        began = time.perf_counter()
        try:
            self._run.store.save(state, tensors, best=best)
        except Untidy:  # it is saved all the same
            self._offer(state.step)
            raise
        self._offer(state.step)
        return time.perf_counter() - began

    def _offer(self, step: int) -> None:
        if self._uploader is not None:
            self._uploader.offer(step)

    def wait(self, must: bool = False) -> None:
        """Waits for the save under way, if any. Its failure is recorded, or raised with `must`."""
        if self._writing is None:
            return
        writing, self._writing = self._writing, None
        try:
            seconds = writing.future.result()
        except SaveFailed as error:
            if must:
                raise
            self._tell("save_failed", error, writing.step)
            return
        except Untidy as error:
            self._tell("save_untidy", error, writing.step)
        else:
            self._run.logs.event("saved", f"step {writing.step}", **writing.to_json(seconds))
        self._saved = writing.step

    def close(self) -> None:
        """Waits for the save under way and ends the writing thread; waits for the mirror, unless
        the run is to stop at once.
        """
        self._writer.shutdown(wait=True)
        if self._uploader is not None and not isinstance(sys.exception(), KeyboardInterrupt):
            self._uploader.wait()

    def _with_logs(self, state: RunState) -> RunState:
        """Syncs the logs to disk; returns the state with their lengths and the run's choices."""
        offsets = self._run.logs.sync()
        return replace(state, log_offsets=offsets, choices=self._run.choices.to_json())

    def _tell(self, kind: str, error: RunError, step: int) -> None:
        self._run.logs.event(kind, str(error), step=step)
        standing = f"; the run goes on: {self._last()}" if kind == "save_failed" else ""
        self._run.console.warn(f"{error}{standing}")

    def _has_memory(self, tensors: Tensors) -> bool:
        """True where the free memory is more than twice the state's size."""
        if psutil.virtual_memory().available > 2 * size_of(tensors):
            return True
        if not self._warned:
            self._run.console.note(
                "no memory for a copy of the state: the run waits while a checkpoint is written"
            )
            self._warned = True
        return False

    def stop(self, state: RunState, why: str = "") -> str:
        """Saves `state` where no update has moved the weights since; returns a sentence that says
        where the run stopped. why: added where the step did not end.
        """
        run = self._run
        self.wait()
        if not run.stop.held and state.step and self._saved != state.step:
            self.save(state, must=True)
        if self._uploader is not None:
            self._uploader.wait()
        if run.stop.held:
            return f"stopped in the middle of step {state.step + 1}{why}: {self._standing()}"
        if state.step == 0:
            return "stopped before the first step ended: nothing was trained, nothing is lost"
        return f"stopped after step {state.step}: {self._standing()}"

    def rescue(self, state: RunState) -> str:
        """Saves `state` after memory ran out, where no update has moved the weights since; a save
        that fails is recorded. Returns a sentence that names the last checkpoint.
        """
        run = self._run
        self.wait()
        if run.stop.held or self._saved == state.step or not state.step:
            return self._last()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        try:
            self.save(state, must=True)
        except (RunError, MemoryError, RuntimeError) as error:
            self._run.logs.event("save_failed", str(error), step=state.step)
        return self._last()

    def newest(self) -> tuple[str, bool]:
        """A sentence that names the newest checkpoint, and whether there is one. Raises RunError
        where the one that is being written cannot be.
        """
        self.wait()
        return self._last(), self._saved is not None

    def _standing(self) -> str:
        if self._saved is None:
            return self._last()
        mirrored = self._uploader.standing() if self._uploader is not None else ""
        end = f"; {mirrored}" if mirrored else ""
        return f"{self._last()}; continue with {self._run.directory.resume_command}{end}"

    def _with_standing(self, error: RunError) -> RunError:
        """The error of a save that must be, with the checkpoint that a resume goes on from."""
        return error if self._saved is None else type(error)(f"{error}; {self._standing()}")

    def _last(self) -> str:
        if self._saved is None:
            return "no checkpoint was saved yet, the run starts over"
        return f"the checkpoint of step {self._saved} is kept"


def _with_room(run: Run, step: int, size: int, attempt: Callable[[], None]) -> None:
    """Calls `attempt` until there is room for what it writes, the checkpoint of `step` with about
    `size` bytes. Raises its DiskFull after checkpoint.wait_for_room_minutes, or where a signal ends
    the waiting; any other error at once.
    """
    failure = _failure_of(attempt)
    seconds = 60 * run.recipe.checkpoint.wait_for_room_minutes
    if failure is None:
        return
    if not seconds:
        raise failure
    ends, is_last = time.monotonic() + seconds, False
    warned: set[int] = set()
    given_up = "the run waits no longer for room; steps after its last checkpoint are lost"
    goes_on = "the run stops when its last save has found room; a second signal gives it up"
    with run.stop.waiting(given_up, goes_on):
        while failure is not None:
            folder = run.store.root if isinstance(failure, NoRoom) else run.directory.path
            disk = existing(folder).stat().st_dev
            if disk not in warned:  # logs and checkpoints may be on two
                _tell(run, step, size, folder)
                warned.add(disk)
            left = max(0.0, ends - time.monotonic())
            with run.watchdog.aside():
                waited = not is_last and run.stop.pause(min(RETRY_SECONDS, left))
            if not waited:
                raise failure
            is_last = left <= RETRY_SECONDS
            failure = _failure_of(attempt)
    run.console.note(f"there is room: the checkpoint of step {step} is saved")


def _failure_of(attempt: Callable[[], None]) -> DiskFull | None:
    try:
        attempt()
    except DiskFull as error:
        return error
    return None


def _tell(run: Run, step: int, size: int, folder: Path) -> None:
    """Warns and records once for each disk that has no room."""
    free = run.store.free_bytes() if folder == run.store.root else shutil.disk_usage(folder).free
    minutes = run.recipe.checkpoint.wait_for_room_minutes
    logs = "" if folder == run.store.root else "log lines wait to be written there, before "
    enough = ", so a quota or the number of files is at its limit" if free >= size else ""
    text = (
        f"the last save of the run waits for room: {folder} has {size_text(free)} free{enough}; "
        f"{logs}the checkpoint of step {step} takes about {size_text(size)}; free space there: "
        f"it is tried again every {RETRY_SECONDS:g} s, for {minutes:g} min at most "
        "(checkpoint.wait_for_room_minutes); Ctrl-C gives up"
    )
    run.logs.event(
        "waiting_for_room",
        text,
        step=step,
        folder=str(folder),
        free_bytes=free,
        needed_bytes=size,
    )
    run.console.warn(text)


def open_store(run_dir: Path) -> CheckpointStore:
    """The checkpoints of a run directory. Raises UsageError where there is no run."""
    directory = RunDirectory.open(run_dir)
    return store_of(recipe_from_json(directory.recipe()), directory)


def store_of(recipe: Recipe, directory: RunDirectory) -> CheckpointStore:
    """The checkpoints of a recipe: in checkpoint.ckpt_path, else in its run directory."""
    root = recipe.checkpoint.ckpt_path
    return CheckpointStore(Path(root) if root else directory.checkpoints, recipe.checkpoint)
