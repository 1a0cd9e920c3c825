"""NEFTune in whole runs of SFT: what resumes, what micro-batches change, what has no noise."""

from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.runs import assert_same_run, lines, tensors, train_until_killed
from postgrad.core.errors import UsageError
from postgrad.observe.console import Console
from postgrad.recipe.recipe import Recipe
from postgrad.training.sft import SFTJob
from postgrad.training.start import resume, train

NOISE = {"type": "sft", "neftune_noise_alpha": 5.0}
HELD_OUT = {"path": "reasoning-gym:spell_backward", "size": 8, "seed": 2, "loss": True}


def weights(recipe: Recipe) -> torch.Tensor:
    saved = tensors(recipe.run_dir, 3)
    return torch.cat([saved[name].double().flatten() for name in sorted(saved) if "ight" in name])


@pytest.mark.parametrize("model", [{}, pytest.param({"lora": {"rank": 2}}, marks=pytest.mark.slow)])
def test_a_killed_and_resumed_run_gives_the_same_bits(
    model: dict[str, Any], make_recipe: Any, console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes = {"algorithm": NOISE, "checkpoint": {"save_steps": 1}, "model": model}
    never, killed = (make_recipe("sft", run, **changes) for run in ("never", "killed"))
    train(never, console)
    train_until_killed(monkeypatch, SFTJob, 2, killed, console)
    with pytest.raises(UsageError, match="neftune_noise_alpha"):
        resume(Path(killed.run_dir), ["--algorithm.neftune_noise_alpha", "4"], [], console)
    resume(Path(killed.run_dir), [], [], console)
    assert_same_run(never, killed, 3)


def test_noise_moves_a_run_that_micro_batches_do_not_and_held_out_losses_have_none(
    make_recipe: Any, console: Console
) -> None:
    runs = {
        "noisy": {"algorithm": NOISE},
        "cut": {"algorithm": NOISE, "batch": {"micro_train_batch_size": 1}},
        "other": {"algorithm": NOISE, "seed": 1, "data": {"seed": 1}},
        "plain": {},
    }
    recipes = {
        name: make_recipe("sft", name, eval={"at_start": True, "loss": True}, **changes)
        for name, changes in runs.items()
    }
    for recipe in recipes.values():
        train(recipe, console)
    noisy, cut, other, plain = (weights(recipe) for recipe in recipes.values())
    assert float((noisy - cut).norm() / noisy.norm()) < 1e-5
    assert float((noisy - plain).norm() / noisy.norm()) > 1e-3
    assert float((noisy - other).norm() / noisy.norm()) > 1e-3
    starts = [lines(Path(recipes[name].run_dir) / "eval.jsonl")[0] for name in ("noisy", "plain")]
    assert starts[0]["loss"] == starts[1]["loss"] > 0.0
    first = [lines(Path(recipes[name].run_dir) / "metrics.jsonl")[0] for name in ("noisy", "plain")]
    assert first[0]["policy/nll"] != first[1]["policy/nll"]
