"""From a checkpoint to a Hugging Face directory, without the run's process."""

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from postgrad.core.errors import UsageError
from postgrad.jobs.checkpoints import open_store
from postgrad.jobs.choices import Choices, choose
from postgrad.models.export import export_hf
from postgrad.observe.run_dir import RunDirectory
from postgrad.parallel.device import compute_dtype
from postgrad.recipe.load import recipe_from_json

FILES = {"policy": "policy.weights", "ema": "policy.ema"}


def export(run_dir: Path, which: str, to: Path, role: str = "policy") -> Path:
    """Writes a checkpoint's policy, or its moving average (role "ema"), to `to`.

    which: latest, best or a step. Raises UsageError where there is no such role, or `to` is there
    already, RunError where there is no such checkpoint.
    """
    if role not in FILES:
        raise UsageError(f"--role {role}: this run has {' and '.join(FILES)}")
    directory = RunDirectory.open(run_dir)
    recipe = recipe_from_json(directory.recipe())
    checkpoint = open_store(run_dir).load(_which(which))
    base = recipe.model.path or str(directory.init)
    choices = choose(recipe, checkpoint.state.choices)
    export_weights(checkpoint.tensors(FILES[role]), base, to, choices, overwrite=False)
    return to


def export_weights(
    weights: Mapping[str, Tensor], base: str, to: Path, choices: Choices, *, overwrite: bool
) -> None:
    """Weights with the base model's config, tokenizer and template, in the dtype of the run."""
    dtype = compute_dtype(choices.dtype, torch.device("cpu"))
    on_cpu = {name: weight.detach().cpu() for name, weight in weights.items()}
    export_hf(on_cpu, base, to, dtype=dtype, overwrite=overwrite)


def _which(text: str) -> str | int:
    if text in ("latest", "best"):
        return text
    if text.isdigit():
        return int(text)
    raise UsageError(f"--checkpoint {text}: latest, best, or the number of a step")
