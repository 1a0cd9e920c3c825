"""Whole runs whose learner leaves its device while the engine samples: the same bits.

A CPU stands in for the device; weights are allocated there, and not pages of a file.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.fake_ranks import FakeGroup, fake_ranks
from helpers.runs import lines
from helpers.tiny_runs import MakeRecipe
from postgrad.checkpoint.settings import CheckpointSettings
from postgrad.checkpoint.store import CheckpointStore
from postgrad.fleet import loading
from postgrad.learner import offload
from postgrad.learner.offload import LearnerOffload
from postgrad.observe.console import Console
from postgrad.recipe.recipe import Recipe
from postgrad.training.run import Run
from postgrad.training.start import resume, train

__all__ = ["fake_ranks"]
PPO = {
    "algorithm": {"type": "ppo", "kl_coef": 0.05, "critic_warmup_steps": 1},
    "batch": {"rollout_batch_size": 4, "n_samples_per_prompt": 4, "train_batch_size": 8},
    "cluster": {"type": "ray"},
}
FOLLOWED = {
    "algorithm": {"type": "grpo", "kl_coef": 0.05},
    "reference": {"ema_decay": 0.5},
    "cluster": {"type": "ray"},
}


@pytest.fixture
def left(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """Makes a CPU count as a device. (what stays, bytes that are away) of every leave."""
    offloads: list[tuple[str, int]] = []
    leave, original_backbone = LearnerOffload.offload, loading._backbone

    def noted(self: LearnerOffload, keep: Any) -> None:
        leave(self, keep)
        if self.copies.nbytes:
            offloads.append((keep, self.copies.nbytes))

    def allocated(model: Any, *rest: Any) -> Any:
        for tensor in (*model.lm.parameters(), *model.lm.buffers()):
            tensor.data = tensor.data.clone()
        return original_backbone(model, *rest)

    monkeypatch.setattr(LearnerOffload, "offload", noted)
    monkeypatch.setattr(loading, "_backbone", allocated)
    monkeypatch.setattr(offload, "frees_device_memory", lambda device: True)
    monkeypatch.setattr(Run, "free_memory", lambda self, keep="all": self.fleet.free_memory(keep))
    return offloads


def state(recipe: Recipe) -> dict[str, bytes]:
    """Every tensor of the last checkpoint, and what was sampled and evaluated."""
    folder = Path(recipe.run_dir)
    checkpoint = CheckpointStore(folder / "checkpoints", CheckpointSettings()).load()
    tensors = {
        f"{stem}/{name}": torch.empty(tensor.shape, dtype=tensor.dtype)
        .copy_(tensor)
        .view(-1)
        .view(torch.uint8)
        .numpy()
        .tobytes()
        for stem in checkpoint.stems
        for name, tensor in checkpoint.tensors(stem).items()
    }
    return {**tensors, **dict(logged(folder))}


def logged(folder: Path) -> Iterator[tuple[str, bytes]]:
    for path in folder.glob("samples*.jsonl"):
        yield path.name, path.read_bytes()
    for line in lines(folder / "metrics.jsonl"):
        for name, value in line.items():
            if name.startswith(("policy/", "critic/", "eval/", "reward/")):
                yield f"{line['step']}/{name}", repr(value).encode()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("job", "sections"),
    [("rl", {}), ("rl", PPO), ("rl", FOLLOWED), ("sft", {"eval": {"every": 1}})],
    ids=["grpo", "ppo on ranks", "a reference that follows", "sft with answers"],
)
def test_a_run_has_the_bits_of_one_whose_learner_stays(
    job: str,
    sections: dict[str, Any],
    make_recipe: MakeRecipe,
    console: Console,
    fake_ranks: list[FakeGroup],
    left: list[tuple[str, int]],
) -> None:
    settings = {"ema_decay": 0.5, "lr": 1e-2}
    stays = make_recipe(job, "stays", learner=settings, **sections)
    leaves = make_recipe(job, "leaves", learner={**settings, "offload": "sampling"}, **sections)
    train(stays, console)
    assert not left
    train(leaves, console)
    assert "nothing" in dict(left) or dict(left).keys() == {"weights"}  # the engine reads them
    assert state(stays) == state(leaves)


@pytest.mark.slow
def test_a_resume_may_change_the_setting(
    make_recipe: MakeRecipe, console: Console, left: list[tuple[str, int]]
) -> None:
    unchanged = make_recipe("rl", "whole", steps=3)
    train(unchanged, console)
    begun = make_recipe("rl", "parts", steps=2, learner={"offload": "sampling"})
    train(begun, console)
    assert left
    resume(Path(begun.run_dir), ["--steps", "3", "--learner.offload", "false"], [], console)
    assert state(unchanged) == state(begun)
