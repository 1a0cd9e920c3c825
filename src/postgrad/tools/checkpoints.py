"""`postgrad checkpoints` lists a run's checkpoints; `postgrad verify` hashes and loads each one,
and checks it against model and logs.
"""

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from torch import Size
from transformers import AutoModelForSequenceClassification

from postgrad.checkpoint.store import Checkpoint, CheckpointInfo, CheckpointStore
from postgrad.core.errors import AS_IT_BEGAN, RunError
from postgrad.fleet.exported import ExportedRole, roles_of
from postgrad.learner.loss_scale import NUMBERS
from postgrad.learner.optimizer import UPDATES
from postgrad.models.adapters import add_adapter
from postgrad.models.config import load_config
from postgrad.models.frozen_parts import frozen_names
from postgrad.models.load import skeleton
from postgrad.models.supported import causal_class
from postgrad.observe.console import Console
from postgrad.observe.follow import read_steps
from postgrad.observe.run_dir import RunDirectory
from postgrad.recipe.load import recipe_from_json
from postgrad.training.restoring import record_of
from postgrad.training.saving import open_store, store_of

Shapes = Mapping[str, Size]


def checkpoints(run_dir: Path, console: Console) -> list[dict[str, Any]]:
    """Shows a table of the run's checkpoints and returns it as JSON values."""
    store = open_store(run_dir)
    infos = store.infos()
    record = record_of(RunDirectory(run_dir))
    mirrored = record.steps if record is not None else ()
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
            _marks(info, mirrored),
            str(len(info.files)),
        )
        for info in infos
    ]
    console.table(
        f"checkpoints in {store.root}", ("step", "size", "evaluation", "state", "files"), rows
    )
    if record is not None:
        there = ", ".join(map(str, mirrored)) or "none"
        console.note(f"mirror {record.url} had those of steps {there} at its last upload")
    return [
        {
            "step": info.step,
            "path": str(info.path),
            "bytes": info.bytes,
            "complete": info.complete,
            "latest": info.latest,
            "best": info.best,
            "kept": info.kept,
            "mirrored": info.step in mirrored,
            "files": list(info.files),
            "problem": info.problem,
            "evaluations": metrics[info.step],
            "evaluated_at": newest[info.step],
        }
        for info in infos
    ]


def _metrics(store: CheckpointStore, info: CheckpointInfo) -> dict[str, float]:
    """The newest evaluation results in a checkpoint's state; {} where it is not complete."""
    return dict(store.load(info.step).state.evaluations) if info.complete else {}


def _shown(metrics: dict[str, float], best: str | None, step: int, evaluated: int | None) -> str:
    names = [name for name in metrics if name.endswith(("/accuracy", "/loss")) or name == best]
    values = ", ".join(f"{name} {metrics[name]:.3f}" for name in names)
    return values if not values or evaluated in (step, None) else f"{values}, of step {evaluated}"


def _size(info: CheckpointInfo) -> str:
    return f"{info.bytes / 2**20:.1f} MiB"


def _marks(info: CheckpointInfo, mirrored: Collection[int]) -> str:
    if info.problem is not None:
        return info.problem
    marks = ("complete", "latest", "best", "kept")
    names = [name for name in marks if getattr(info, name)]
    return ", ".join([*names, "mirrored"] if info.step in mirrored else names)


def verify(run_dir: Path, console: Console) -> list[dict[str, Any]]:
    """Shows a line for each checkpoint. After all were checked, raises RunError that names the
    first wrong file of each damaged checkpoint.
    """
    directory = RunDirectory.open(run_dir)
    recipe = recipe_from_json(directory.recipe())
    store = store_of(recipe, directory)
    base = recipe.model.source or str(directory.init)
    wanted = {stem: _shapes(role) for stem, role in roles_of(recipe, base).items()}
    states = [(info, _problem(store, info, wanted, run_dir)) for info in store.infos()]
    rows = [(str(info.step), problem or "good") for info, problem in states]
    console.table(f"checkpoints in {store.root}", ("step", "state"), rows)
    broken = [problem for _, problem in states if problem is not None]
    if broken or not states:
        raise RunError("\n".join(broken) or f"{store.root} has no checkpoint")
    return [{"step": info.step, "path": str(info.path), "good": True} for info, _ in states]


def _problem(
    store: CheckpointStore, info: CheckpointInfo, wanted: Mapping[str, Shapes], run_dir: Path
) -> str | None:
    if info.problem is not None:
        return info.problem
    try:
        checkpoint = store.load(info.step)
        _check_tensors(checkpoint, wanted)
    except RunError as error:
        return str(error)
    for name, offset in checkpoint.state.log_offsets.items():
        log = run_dir / name
        size = log.stat().st_size if log.exists() else 0
        if size < offset:
            return f"{log} has {size} bytes, the checkpoint of step {info.step} counts on {offset}"
    return None


def _check_tensors(checkpoint: Checkpoint, by_role: Mapping[str, Shapes]) -> None:
    """Raises RunError where weights, moments or averages have other names or shapes than the
    parameters of their role. by_role: shapes of parameters by name.
    """
    for stem in checkpoint.stems:
        path = checkpoint.path / f"{stem}.safetensors"
        tensors = dict(checkpoint.tensors(stem))
        names = set(tensors)
        role, _, content = stem.partition(".")
        if role not in by_role:
            raise RunError(f"{path} belongs to a role that this run does not have")
        wanted = by_role[role]
        if content == "optimizer":
            if tensors.pop(UPDATES, None) is None:
                raise RunError(f"{path} lacks {UPDATES!r}, the number of updates")
            for number in NUMBERS:
                tensors.pop(number, None)
            names = {name.rpartition(".")[0] for name in tensors}
        shapes = {name: wanted[name] for name in names if name in wanted}
        if names != set(wanted) and tensors:
            unknown, missing = sorted(names - set(wanted)), sorted(set(wanted) - names)
            raise RunError(
                f"{path} is of another model: unknown {unknown[:3]}, lacks {missing[:3]}; "
                f"{AS_IT_BEGAN}"
            )
        for name, tensor in tensors.items():
            parameter = name if name in shapes else name.rpartition(".")[0]
            if tensor.shape != shapes[parameter]:
                raise RunError(
                    f"{path}: {name!r} has shape {tuple(tensor.shape)}, the model's is "
                    f"{tuple(shapes[parameter])}; {AS_IT_BEGAN}"
                )


def _shapes(role: ExportedRole) -> Shapes:
    """The shape of every parameter by name. The model is built on the meta device: no weights."""
    config = load_config(role.base)
    kind = causal_class(config)
    if role.scores:
        config.num_labels, kind = 1, AutoModelForSequenceClassification
    lm = skeleton(config, kind, role.base)
    named = lm.named_parameters()
    if role.lora is not None:
        named = add_adapter(lm, role.lora, seed=0).parameters().items()
    frozen = frozen_names(lm, role.freeze if role.lora is None else ())
    return {name: parameter.shape for name, parameter in named if name not in frozen}
