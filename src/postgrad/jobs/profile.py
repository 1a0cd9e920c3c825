"""`train --profile`: where the time of one step goes, by torch's own profiler."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from torch import Tensor
from torch.profiler import profile

from postgrad.checkpoint.state import RunState
from postgrad.jobs.loop import Job
from postgrad.jobs.results import Result
from postgrad.observe.console import Console

PROFILED = 2  # this process's second step: the first one warms up


class Profiled:
    """A job whose second step is recorded as a trace in `to`."""

    def __init__(self, job: Job, to: Path, console: Console) -> None:
        self._job = job
        self._to = to
        self._console = console
        self._steps = 0

    def step(self, state: RunState) -> tuple[RunState, dict[str, float]]:
        """Job.step."""
        self._steps += 1
        if self._steps != PROFILED:
            return self._job.step(state)
        with profile() as recorded:
            result = self._job.step(state)
        recorded.export_chrome_trace(str(self._to))
        self._console.note(
            cast(Any, recorded.key_averages()).table(sort_by="self_cpu_time_total", row_limit=12)
        )
        self._console.note(
            f"trace of step {state.step + 1}: {self._to} (open it in a trace viewer)"
        )
        return result

    def evaluate(self) -> list[Result]:
        """Job.evaluate."""
        return self._job.evaluate()

    def tensors(self) -> dict[str, Mapping[str, Tensor]]:
        """Job.tensors."""
        return self._job.tensors()
