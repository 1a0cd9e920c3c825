"""Uploads a run's checkpoints to its mirror (`checkpoint.mirror`) behind the next steps."""

import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from postgrad.checkpoint.manifest import Damaged
from postgrad.checkpoint.mirror import Mirror, Owner, TakenOver
from postgrad.checkpoint.state import RunState
from postgrad.core.errors import RunError
from postgrad.observe.run_dir import RunDirectory
from postgrad.observe.sinks import FILES
from postgrad.training.restoring import BESIDE, record_of
from postgrad.training.run import Run

ATTEMPTS, RETRY_SECONDS = 3, 10.0  # of the last upload of a run
POLL_SECONDS = 0.05


def files_of(
    directory: RunDirectory, offsets: Mapping[str, int]
) -> Iterator[tuple[str, tuple[Path, int]]]:
    """The files that go with a checkpoint: name in the run directory, path, bytes that belong.

    offsets: of the logs, by name.
    """
    path = directory.path
    yield from ((name, (path / name, offsets[name])) for name in FILES if offsets.get(name))
    folders = (path.glob("*"), directory.init.rglob("*"), directory.images.glob("*"))
    for file in (file for folder in folders for file in sorted(folder)):
        name = file.relative_to(path).as_posix()
        if BESIDE.fullmatch(name) and file.is_file():
            yield name, (file, file.stat().st_size)


class Uploader:
    """Uploads a run's checkpoints in a thread of its own: one at a time, and of those that wait the
    newest. A failure is warned of and recorded, and the next checkpoint is tried.
    """

    def __init__(self, run: Run, state: RunState) -> None:
        """state: that the run starts from; uploaded where the mirror lacks it."""
        record = record_of(run.directory)
        assert record is not None  # `claim` wrote it
        self._run, self._record = run, record
        self._mirror = Mirror(record.url)
        self._mirror.claim(Owner(record.run, {}), record.writer)
        self._changing = threading.Lock()
        self._waiting: int | None = None
        self._busy = self._is_lost = False
        self._offered = self._uploaded = state.step or None  # steps
        self._settled: int | None = None  # the step that was waited for
        there = f"it has those of steps {', '.join(map(str, record.steps))}"
        run.console.note(
            f"mirror: {record.url} gets each checkpoint behind the next steps; "
            f"{there if record.steps else 'it has none yet'}"
        )
        if state.step and state.step not in record.steps:
            self._uploaded = None
            self.offer(state.step)

    def offer(self, step: int) -> None:
        """Has a committed checkpoint uploaded soon; it takes the place of another that waits. Until
        that has ended it is not removed from the disk.
        """
        held = self._run.store.held
        with self._changing:
            self._offered = step
            if self._is_lost:
                held.clear()
                return
            if self._waiting is not None:
                held.discard(self._waiting)
            held.add(step)
            self._waiting = step
            if self._busy:
                return
            self._busy = True
        threading.Thread(target=self._work, name="mirror", daemon=True).start()

    def wait(self) -> None:
        """Waits until the newest checkpoint is uploaded, or has failed for good. Ctrl-C, or a
        second signal, ends that.
        """
        if not self._busy and (self._settled == self._offered or not self._is_behind):
            return
        self._settled = self._offered
        run, url, step = self._run, self._record.url, self._offered
        run.console.note(f"waiting until {url} has the checkpoint of step {step}")
        given_up = f"the run waits no longer for the upload to {url}"
        goes_on = "the run stops when its last checkpoint is uploaded; a second signal gives it up"
        with run.stop.waiting(given_up, goes_on), run.watchdog.aside():
            for attempt in range(ATTEMPTS):
                if attempt and step is not None:
                    if not run.stop.pause(RETRY_SECONDS):
                        return
                    self.offer(step)
                while self._busy:
                    if not run.stop.pause(POLL_SECONDS):
                        return
                if not self._is_behind or self._is_lost:
                    return

    @property
    def _is_pressed(self) -> bool:
        """Whether a newer checkpoint waits."""
        return self._waiting is not None

    @property
    def _is_behind(self) -> bool:
        return self._uploaded != self._offered

    def standing(self) -> str:
        """A clause that says what the mirror has."""
        url, steps = self._record.url, self._record.steps
        if not self._is_behind:
            return f"{url} has it too" if self._offered else ""
        newest = f"its newest is of step {steps[-1]}" if steps else "it has none"
        return f"{url} is behind, {newest}: the same command uploads what is missing"

    def _work(self) -> None:
        while (step := self._next()) is not None:
            try:
                self._bring_up_to(step)
            except (RunError, Damaged, OSError) as error:
                self._tell(step, error)
            except BaseException:  # an error of this code: nobody waits for it
                self._busy = False
                raise
            with self._changing:
                if self._waiting != step:
                    self._run.store.held.discard(step)

    def _next(self) -> int | None:
        """The step to upload now; None where none waits, and the thread ends."""
        with self._changing:
            step, self._waiting = self._waiting, None
            if self._is_lost:
                step = None
            self._busy = step is not None
            return step

    def _bring_up_to(self, step: int) -> None:
        """Uploads a checkpoint, then older ones that are never removed and were passed over while
        another was under way; removes from the mirror what the run does not keep.
        """
        store = self._run.store
        state = self._upload(step)
        self._uploaded = step
        kept = store.kept_in_mirror(state, self._mirror.steps())
        for old in reversed(store.never_removed(state)):
            if not self._is_pressed and old < step and old not in kept:
                self._upload(old)
                kept.add(old)
        self._record = replace(self._record, steps=tuple(sorted(kept)))
        self._record.write(self._run.directory)
        self._mirror.prune(kept)

    def _upload(self, step: int) -> RunState:
        """Uploads one checkpoint with its files; returns its state."""
        began = time.perf_counter()
        folder, state = self._run.store.place(step)
        beside_it = dict(files_of(self._run.directory, state.log_offsets))
        sent = self._mirror.upload(step, folder, beside_it)
        seconds = round(time.perf_counter() - began, 4)
        numbers = {"step": step, "upload_seconds": seconds, "size_bytes": sent}
        self._run.logs.event("mirrored", f"step {step}", **numbers)
        return state

    def _tell(self, step: int, error: Exception) -> None:
        self._is_lost = isinstance(error, TakenOver)
        if self._uploaded == step:
            text = f"the mirror has the checkpoint of step {step}, and is not tidied up: {error}"
        else:
            text = f"the mirror lacks the checkpoint of step {step}, which is on the disk: {error}"
        self._run.logs.event("mirror_failed", text, step=step)
        again = "" if self._is_lost else "; the next checkpoint is tried"
        self._run.console.warn(f"{text}{again}")
