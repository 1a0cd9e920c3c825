"""With save_hf = "each" every checkpoint has its Hugging Face directory, and there is no other."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from postgrad.checkpoint.settings import CheckpointSettings
from postgrad.checkpoint.store import CheckpointStore
from postgrad.fleet.exported import ExportedRole
from postgrad.observe.console import Console
from postgrad.training.start import train

MakeRecipe = Callable[..., Any]


def recipe_with_copies(make_recipe: MakeRecipe, **checkpoint: Any) -> Any:
    return make_recipe(
        "sft",
        "copies",
        steps=4,
        checkpoint={"save_steps": 1, "max_ckpt_num": 2, "save_hf": "each", **checkpoint},
    )


@pytest.mark.slow
def test_each_checkpoint_that_is_kept_has_its_copy_with_its_weights(
    make_recipe: MakeRecipe,
) -> None:
    recipe = recipe_with_copies(make_recipe)
    train(recipe, Console("quiet"))
    run = Path(recipe.run_dir)
    store = CheckpointStore(run / "checkpoints", CheckpointSettings())
    copies = sorted(path.name for path in (run / "hf").iterdir())
    assert (
        copies == [f"step-{step:06d}" for step in store.steps()] == ["step-000003", "step-000004"]
    )
    for step in store.steps():
        weights = store.load(step).tensors("policy.weights")
        copied = load_file(run / "hf" / f"step-{step:06d}" / "model.safetensors")
        assert all(torch.equal(copied[name], weights[name]) for name in copied)


def test_a_copy_that_cannot_be_written_costs_neither_run_nor_checkpoint(
    make_recipe: MakeRecipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = recipe_with_copies(make_recipe)
    run, export = Path(recipe.run_dir), ExportedRole.export

    def full(role: Any, weights: Any, state: Any, to: Path, *args: Any, **more: Any) -> None:
        if to.parent.name == "hf":
            raise OSError(28, "No space left on device")
        export(role, weights, state, to, *args, **more)

    monkeypatch.setattr(ExportedRole, "export", full)
    train(recipe, Console("quiet"))
    assert CheckpointStore(run / "checkpoints", CheckpointSettings()).steps() == [3, 4]
    assert (run / "events.jsonl").read_text("utf-8").count('"copy_failed"') == 4
    assert (run / "model" / "model.safetensors").exists()
