"""`postgrad checkpoints`: what a run can go on from."""

from pathlib import Path
from typing import Any

from postgrad.checkpoint.store import CheckpointInfo, CheckpointStore
from postgrad.observe.console import Console
from postgrad.observe.log_lines import read_steps
from postgrad.observe.run_dir import RunDirectory
from postgrad.recipe.load import recipe_from_json
from postgrad.recipe.recipe import Recipe


def checkpoints(run_dir: Path, console: Console) -> list[dict[str, Any]]:
    """Shows a table of the run's checkpoints and returns it as JSON values."""
    store = open_store(run_dir)
    infos = store.infos()
    metrics = {one.step: _metrics(store, one) for one in infos}
    evaluated = [line["step"] for line in read_steps(run_dir / "eval.jsonl")]
    newest = {
        step: max((one for one in evaluated if one <= step), default=None) if known else None
        for step, known in metrics.items()
    }
    rows = [
        (
            str(one.step),
            _size(one),
            _shown(metrics[one.step], store.best_metric, one.step, newest[one.step]),
            _marks(one),
            str(len(one.files)),
        )
        for one in infos
    ]
    console.table(
        f"checkpoints in {store.root}", ("step", "size", "evaluation", "state", "files"), rows
    )
    return [
        {
            "step": one.step,
            "path": str(one.path),
            "bytes": one.bytes,
            "complete": one.complete,
            "latest": one.latest,
            "best": one.best,
            "files": list(one.files),
            "problem": one.problem,
            "evaluations": metrics[one.step],
            "evaluated_at": newest[one.step],
        }
        for one in infos
    ]


def open_store(run_dir: Path) -> CheckpointStore:
    """The checkpoints of a run directory. Raises UsageError where there is no run."""
    directory = RunDirectory.open(run_dir)
    return store_of(recipe_from_json(directory.recipe()), directory)


def store_of(recipe: Recipe, directory: RunDirectory) -> CheckpointStore:
    """Where a recipe's checkpoints lie: in its run directory unless it says otherwise."""
    root = recipe.checkpoint.ckpt_path
    return CheckpointStore(Path(root) if root else directory.checkpoints, recipe.checkpoint)


def _metrics(store: CheckpointStore, one: CheckpointInfo) -> dict[str, float]:
    """The newest evaluation results that a whole checkpoint knows."""
    return dict(store.load(one.step).state.evaluations) if one.complete else {}


def _shown(metrics: dict[str, float], best: str | None, step: int, evaluated: int | None) -> str:
    names = [name for name in metrics if name.endswith(("/accuracy", "/loss")) or name == best]
    told = ", ".join(f"{name} {metrics[name]:.3f}" for name in names)
    return told if not told or evaluated in (step, None) else f"{told}, of step {evaluated}"


def _size(one: CheckpointInfo) -> str:
    return f"{one.bytes / 2**20:.1f} MiB"


def _marks(one: CheckpointInfo) -> str:
    if one.problem is not None:
        return one.problem
    return ", ".join(name for name in ("complete", "latest", "best") if getattr(one, name))
