"""A run directory as Python sees it: files are only read, so that a run may be under way."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from postgrad.core.errors import UsageError
from postgrad.core.untrusted import path_problem, shown
from postgrad.observe.follow import read_lines, read_object
from postgrad.observe.run_dir import SUMMARY, RunDirectory
from postgrad.recipe.load import recipe_from_json
from postgrad.recipe.recipe import Recipe

if TYPE_CHECKING:  # neither is imported before it is asked for
    import pandas  # pyright: ignore[reportMissingTypeStubs]

    from postgrad.checkpoint.store import CheckpointInfo


class Run:
    """A run that was begun, finished or not: Run("runs/x").

    path: its directory. Raises UsageError where there is none.
    """

    def __init__(self, path: str | Path) -> None:
        self._directory = RunDirectory.open(Path(path))
        self.path = Path(path)

    def __repr__(self) -> str:
        return f"Run({str(self.path)!r})"

    @property
    def recipe(self) -> Recipe:
        """The resolved recipe. Raises UsageError where another version wrote it."""
        return recipe_from_json(self._directory.recipe())

    @property
    def summary(self) -> dict[str, Any]:
        """The outcome of the run: summary.json. Raises UsageError where the run has not ended."""
        summary = read_object(self.path / SUMMARY)
        if summary is None:
            raise UsageError(
                f"{self.path} has no {SUMMARY}: the run has not ended; see metrics(), or resume it"
            )
        return summary

    def metrics(self) -> "pandas.DataFrame":
        """metrics.jsonl: a row for each step, a column for each metric. Needs pandas."""
        return self._frame("metrics.jsonl")

    def evaluations(self) -> "pandas.DataFrame":
        """eval.jsonl: a row for each evaluation of one set. Needs pandas."""
        return self._frame("eval.jsonl")

    def samples(self, step: int | None = None) -> Iterator[dict[str, Any]]:
        """Every sample of the run, or of a step, in the order of samples.jsonl, one at a time: it
        may be larger than memory. Keys: docs/run-directory.md.
        """
        for line in read_lines(self.path / "samples.jsonl"):
            if step is None or line.get("step") == step:
                yield line

    def events(self) -> list[dict[str, Any]]:
        """Starts, resumes, saves, sentinels, failures, with their times: events.jsonl."""
        return list(read_lines(self.path / "events.jsonl"))

    @property
    def checkpoints(self) -> "list[CheckpointInfo]":
        """Every checkpoint by step: `step`, `path`, `bytes`, `latest`, `best`, `complete`. All are
        hashed.
        """
        from postgrad.training.saving import open_store

        return open_store(self.path).infos()

    def export(
        self, to: str | Path, checkpoint: str | int = "latest", role: str | None = None
    ) -> Path:
        """Writes a checkpoint as a Hugging Face directory and returns it.

        checkpoint: "latest", "best" or a step. role: "policy", "critic", "reward" or "ema"; what
        the job trains where left out. Raises UsageError where there is no such role, or `to` is
        there already, RunError where there is no such checkpoint.
        """
        from postgrad.tools.export import export

        return export(self.path, str(checkpoint), _writable_path(to), role)

    def fork(self, to: str | Path, checkpoint: str | int = "latest") -> "Run":
        """Makes a new run in `to` that is this one as it was at a checkpoint, and returns it. This
        run is only read.

        checkpoint: "latest", "best" or a step. Raises UsageError where `to` is not empty, RunError
        where there is no such checkpoint, or a file of the run is missing or damaged.
        """
        from postgrad.observe.console import Console
        from postgrad.tools.fork import fork

        fork(self.path, str(checkpoint), _writable_path(to), Console("quiet"))
        return Run(to)

    def _frame(self, name: str) -> "pandas.DataFrame":
        try:
            import pandas  # pyright: ignore[reportMissingTypeStubs]
        except ImportError as error:
            raise UsageError(
                "tables of a run are pandas frames, and pandas is not installed: pip install pandas"
            ) from error
        return pandas.DataFrame(list(read_lines(self.path / name)))


class RunsOfSweep:
    """The runs of a sweep, finished or not: RunsOfSweep("runs/x").

    path: its directory. Raises UsageError where there is none.
    """

    def __init__(self, path: str | Path) -> None:
        from postgrad.recipe.sweep import SWEEP, is_sweep
        from postgrad.tools.sweep.run import standing_of

        self.path = Path(path)
        if not is_sweep(self.path):
            single = f"; it holds a single run: Run({str(self.path)!r})"
            hint = single if RunDirectory.holds_run(self.path) else ""
            raise UsageError(f"{self.path} is no sweep: it has no {SWEEP}{hint}")
        self._standing = standing_of(self.path)

    def __repr__(self) -> str:
        return f"RunsOfSweep({str(self.path)!r})"

    @property
    def runs(self) -> dict[str, Run]:
        """Runs that have begun by their names, the best first; of a pipeline its last stages."""
        judged = {result.trial.name: result.trial.judged for result in self._standing.results}
        return {name: Run(path) for name, path in judged.items() if RunDirectory.holds_run(path)}

    @property
    def best(self) -> Run | None:
        """The finished run with the best value. `tied` are those that may be as good."""
        best = self._standing.best
        return None if best is None else Run(best.trial.judged)

    @property
    def tied(self) -> list[str]:
        """Names of finished runs whose interval overlaps with that of the best, or is missing."""
        return [result.trial.name for result in self._standing.tied]

    @property
    def summary(self) -> dict[str, Any]:
        """What `postgrad train --sweep ... --json` prints: metric, best, verdict, runs, ..."""
        return self._standing.to_json()


def _writable_path(to: str | Path) -> Path:
    """The path. Raises UsageError for one that no file can have."""
    if problem := path_problem(str(to)):
        raise UsageError(f"to {shown(str(to))}: {problem}")
    return Path(to)
