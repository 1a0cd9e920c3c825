"""When a run saves, and what becomes of a save that fails."""

import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Protocol

from torch import Tensor

from postgrad.checkpoint.state import RunState
from postgrad.checkpoint.store import SaveFailed
from postgrad.jobs.run import Run


class Stateful(Protocol):
    """The part of a job that a checkpoint holds."""

    def tensors(self) -> dict[str, Mapping[str, Tensor]]:
        """The state of every role that changes, by file stem."""
        ...


class Saver:
    """Saves a run's state. `state` is what the run starts from: saved already, unless new."""

    def __init__(self, run: Run, job: Stateful, state: RunState) -> None:
        self._run = run
        self._job = job
        self._saved: int | None = state.step or None
        self._at = time.monotonic()

    def due(self, state: RunState) -> bool:
        """True where save_steps or save_minutes ask for one."""
        settings = self._run.recipe.checkpoint
        by_steps = bool(settings.save_steps) and state.step % settings.save_steps == 0
        seconds = time.monotonic() - self._at
        return by_steps or bool(settings.save_minutes and seconds >= 60 * settings.save_minutes)

    def save(self, state: RunState, *, best: bool = False, must: bool = False) -> bool:
        """True where the checkpoint stands. A failure is told and recorded, and the run goes on
        with its older checkpoints, unless there `must` be one: then it is raised.
        """
        run = self._run
        with run.phase("save"):
            offsets = run.logs.sync()
            kept = replace(state, log_offsets=offsets, choices=run.choices.to_json())
            self._at = time.monotonic()
            try:
                run.store.save(kept, self._job.tensors(), best=best)
            except SaveFailed as error:
                if must:
                    raise
                run.logs.event("save_failed", str(error), step=state.step)
                run.console.warn(str(error))
                return False
        self._saved = state.step
        return True

    def stop(self, state: RunState) -> str:
        """Asked to stop: saves `state` where it is a boundary; says where the run stands."""
        run = self._run
        if run.stop.held:
            middle = (
                f"stopped in the middle of step {state.step + 1}, which was not foreseen to end"
            )
            limit = f"within checkpoint.grace_seconds = {run.recipe.checkpoint.grace_seconds:g}"
            return f"{middle} {limit}: {self._standing()}"
        if state.step == 0:
            return "stopped before the first step ended: nothing was trained, nothing is lost"
        if self._saved != state.step:
            self.save(state, must=True)
        return f"stopped after step {state.step}: {self._standing()}"

    def _standing(self) -> str:
        if self._saved is None:
            return "no checkpoint was saved yet, the run begins anew"
        resume = f"postgrad resume {self._run.directory.path}"
        return f"the checkpoint of step {self._saved} stands; continue with {resume}"
