"""`postgrad checkpoints`: the checkpoints of a run, with sizes and evaluations."""

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
    metrics = {info.step: _metrics(store, info) for info in infos}
    evaluated = [line["step"] for line in read_steps(run_dir / "eval.jsonl")]
    newest = {
        step: max(
            (evaluated_step for evaluated_step in evaluated if evaluated_step <= step), default=None
        )
        if evaluations
        else None
        for step, evaluations in metrics.items()
    }
    rows = [
        (
            str(info.step),
            _size(info),
            _shown(metrics[info.step], store.best_metric, info.step, newest[info.step]),
            _marks(info),
            str(len(info.files)),
        )
        for info in infos
    ]
    console.table(
        f"checkpoints in {store.root}", ("step", "size", "evaluation", "state", "files"), rows
    )
    return [
        {
            "step": info.step,
            "path": str(info.path),
            "bytes": info.bytes,
            "complete": info.complete,
            "latest": info.latest,
            "best": info.best,
            "files": list(info.files),
            "problem": info.problem,
            "evaluations": metrics[info.step],
            "evaluated_at": newest[info.step],
        }
        for info in infos
    ]


def open_store(run_dir: Path) -> CheckpointStore:
    """The checkpoints of a run directory. Raises UsageError where there is no run."""
    directory = RunDirectory.open(run_dir)
    return store_of(recipe_from_json(directory.recipe()), directory)


def store_of(recipe: Recipe, directory: RunDirectory) -> CheckpointStore:
    """The checkpoints of a recipe: in checkpoint.ckpt_path, else in its run directory."""
    root = recipe.checkpoint.ckpt_path
    return CheckpointStore(Path(root) if root else directory.checkpoints, recipe.checkpoint)


def _metrics(store: CheckpointStore, info: CheckpointInfo) -> dict[str, float]:
    """The newest evaluation results in a checkpoint's state; {} where it is not complete."""
    return dict(store.load(info.step).state.evaluations) if info.complete else {}


def _shown(metrics: dict[str, float], best: str | None, step: int, evaluated: int | None) -> str:
    names = [name for name in metrics if name.endswith(("/accuracy", "/loss")) or name == best]
    values = ", ".join(f"{name} {metrics[name]:.3f}" for name in names)
    return values if not values or evaluated in (step, None) else f"{values}, of step {evaluated}"


def _size(info: CheckpointInfo) -> str:
    return f"{info.bytes / 2**20:.1f} MiB"


def _marks(info: CheckpointInfo) -> str:
    if info.problem is not None:
        return info.problem
    return ", ".join(name for name in ("complete", "latest", "best") if getattr(info, name))
