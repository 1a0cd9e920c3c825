"""Looking at what a run left behind, and killing one."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from postgrad.checkpoint.state import RunState
from postgrad.core.members import has_lines, open_lines
from postgrad.observe.console import Console
from postgrad.recipe.recipe import Recipe
from postgrad.training.start import train

ENDINGS = ("_seconds", "_bytes", "_per_second", "_time_fraction")


class Killed(Exception):
    """The process ended here."""


def lines(path: Path) -> list[dict[str, Any]]:
    with open_lines(path) as file:
        return [json.loads(line) for line in file]


def whole_lines(path: Path) -> list[dict[str, Any]]:
    """Of a file that a run is writing, or has yet to begin."""
    text = path.read_text("utf-8") if path.exists() else ""
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


def timeless(path: Path) -> list[dict[str, Any]]:
    return [{k: v for k, v in line.items() if not k.endswith(ENDINGS)} for line in lines(path)]


def tensors(run_dir: str, step: int) -> dict[str, torch.Tensor]:
    folder = Path(run_dir) / "checkpoints" / f"step-{step:06d}"
    return {
        f"{path.stem}/{name}": tensor
        for path in folder.glob("*.safetensors")
        for name, tensor in load_file(path).items()
    }


def assert_same_run(first_recipe: Recipe, second_recipe: Recipe, step: int) -> None:
    a, b = tensors(first_recipe.run_dir, step), tensors(second_recipe.run_dir, step)
    assert a.keys() == b.keys()
    assert all(torch.equal(a[name], b[name]) for name in a)
    for file in ("metrics.jsonl", "eval.jsonl", "samples.jsonl", "eval_samples.jsonl"):
        first, second = Path(first_recipe.run_dir) / file, Path(second_recipe.run_dir) / file
        assert has_lines(first) == has_lines(second)
        if has_lines(first):
            assert timeless(first) == timeless(second)


def kill_after(monkeypatch: pytest.MonkeyPatch, kind: type, steps: int) -> None:
    """The process dies in the middle of the step after `steps`: its samples are logged, its weights
    have moved, nothing of it is saved.
    """
    original_step = kind.step

    def step(self: Any, state: RunState) -> Any:
        result = original_step(self, state)
        if state.step == steps:
            raise Killed
        return result

    monkeypatch.setattr(kind, "step", step)


def train_until_killed(
    monkeypatch: pytest.MonkeyPatch, kind: type, steps: int, recipe: Recipe, console: Console
) -> None:
    """Trains until `kill_after` strikes."""
    with monkeypatch.context() as patch:
        kill_after(patch, kind, steps)
        with pytest.raises(Killed):
            train(recipe, console)
