"""From a checkpoint to a Hugging Face directory, without the run's process."""

from pathlib import Path

from postgrad.checkpoint.store import BEST, LATEST
from postgrad.core.errors import UsageError
from postgrad.fleet.choices import choose
from postgrad.fleet.exported import own_role, role_of
from postgrad.models.adapter_files import export_merged
from postgrad.models.files import is_adapter
from postgrad.observe.run_dir import CHECKPOINTS, RunDirectory
from postgrad.recipe.load import recipe_from_json
from postgrad.training.card import card_of
from postgrad.training.saving import open_store


def checkpoint_in(path: Path) -> tuple[Path, str] | None:
    """(run directory, which checkpoint) that `path` means: RUN_DIR, whose newest is meant, or
    RUN_DIR/checkpoints/step-000010, latest or best. None where it is nothing of a run.

    Raises UsageError for another name in RUN_DIR/checkpoints.
    """
    if RunDirectory.holds_run(path):
        return path, LATEST
    run_dir = path.parent.parent
    if not path.exists() or path.parent.name != CHECKPOINTS or not RunDirectory.holds_run(run_dir):
        return None
    if path.name in (LATEST, BEST):
        return run_dir, path.name
    number = path.name.removeprefix("step-")
    if number == path.name or not number.isdecimal():
        raise UsageError(f"{path} is no checkpoint: name RUN_DIR/checkpoints/step-000010, say")
    return run_dir, number


def export(
    run_dir: Path, which: str, to: Path, name: str | None = None, *, adapter: bool = False
) -> Path:
    """Writes one role of a checkpoint as a Hugging Face directory to `to`, which it returns.

    run_dir: a run, or the directory of an adapter, which is written merged into its base.
    which: "latest", "best" or a step. name: as of `role_of`; None: the role that the job trains.
    adapter: writes the adapter alone, as PEFT's directory, not merged into its base. Raises
    UsageError where there is no such role or `to` exists, RunError where there is no such
    checkpoint.
    """
    if is_adapter(run_dir):
        if name is not None or which != "latest" or adapter:
            raise UsageError(
                f"{run_dir} is an adapter and no run: it has neither roles nor checkpoints, and is "
                "exported merged; leave out --role, --checkpoint and --adapter"
            )
        export_merged(run_dir, to)
        return to
    directory = RunDirectory.open(run_dir)
    recipe = recipe_from_json(directory.recipe())
    base = recipe.model.source or str(directory.init)
    role_name = name or own_role(recipe)
    role = role_of(recipe, role_name, base)
    checkpoint = open_store(run_dir).load(which)
    choices = choose(recipe, checkpoint.state.choices)
    state = checkpoint.state.algorithm
    weights = checkpoint.tensors(role.stem)
    card = card_of(directory, recipe, checkpoint.state, role.base, role=role_name, adapter=adapter)
    if adapter:
        role.export_adapter(weights, to, choices, card)
    else:
        role.export(weights, state, to, choices, overwrite=False, card=card)
    return to
