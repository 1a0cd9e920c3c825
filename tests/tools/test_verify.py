"""verify names the file that is wrong, whatever is wrong with it."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from helpers.tiny_runs import MakeRecipe
from postgrad.checkpoint.manifest import entry_of
from postgrad.core.errors import RunError
from postgrad.observe.console import Console
from postgrad.tools.checkpoints import verify


@pytest.fixture
def run_dir(trained: MakeRecipe, tmp_path: Path) -> Path:
    """A copy of one run, to be damaged."""
    recipe = trained("sft", checkpoint={"save_steps": 1}, learner={"ema_decay": 0.5})
    return Path(shutil.copytree(recipe.run_dir, tmp_path / "run"))


def forge(file: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    """A changed file with a manifest that agrees with it."""
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)
    path = file.parent / "manifest.json"
    manifest = json.loads(path.read_text("utf-8"))
    entry = entry_of(file)
    manifest["files"][file.name] = {"size": entry.size, "sha256": entry.sha256}
    path.write_text(json.dumps(manifest), "utf-8")


def test_whole_checkpoints_are_good(run_dir: Path, console: Console) -> None:
    assert [checkpoint["step"] for checkpoint in verify(run_dir, console)] == [1, 2, 3]


def test_a_changed_file_is_named(run_dir: Path, console: Console) -> None:
    file = run_dir / "checkpoints" / "step-000002" / "policy.optimizer.safetensors"
    file.write_bytes(file.read_bytes() + b"x")
    with pytest.raises(RunError, match=r"step-000002/policy\.optimizer\.safetensors has"):
        verify(run_dir, console)


@pytest.mark.parametrize("stem", ["policy.weights", "policy.optimizer", "policy.ema"])
def test_tensors_of_another_shape_or_name_are_named_though_every_hash_is_right(
    stem: str, run_dir: Path, console: Console
) -> None:
    file = run_dir / "checkpoints" / "step-000003" / f"{stem}.safetensors"
    name = sorted(load_file(file))[0]
    forge(file, lambda tensors: tensors.update({name: torch.zeros(7)}))
    with pytest.raises(RunError, match=rf"{stem}\.safetensors: '{name}' has shape \(7,\).*; go on"):
        verify(run_dir, console)
    forge(file, lambda tensors: tensors.update({"other.x": tensors.pop(name)}))
    with pytest.raises(RunError, match=rf"{stem}\.safetensors is of another model.*; go on"):
        verify(run_dir, console)


def test_an_optimizer_that_does_not_say_how_far_it_is_is_named(
    run_dir: Path, console: Console
) -> None:
    file = run_dir / "checkpoints" / "step-000003" / "policy.optimizer.safetensors"
    assert int(load_file(file)["updates"]) == 3
    forge(file, lambda tensors: tensors.pop("updates"))
    with pytest.raises(RunError, match=r"policy\.optimizer\.safetensors lacks 'updates'"):
        verify(run_dir, console)


def test_a_file_that_is_no_safetensors_is_refused_unread(run_dir: Path, console: Console) -> None:
    """A pickle, and a header that declares more than there is."""
    for content in (b"\x80\x04\x95pickle", b"\xff" * 7 + b"\x7f" + b"{}"):
        file = run_dir / "checkpoints" / "step-000003" / "policy.weights.safetensors"
        file.write_bytes(content)
        path = file.parent / "manifest.json"
        manifest = json.loads(path.read_text("utf-8"))
        entry = entry_of(file)
        manifest["files"][file.name] = {"size": entry.size, "sha256": entry.sha256}
        path.write_text(json.dumps(manifest), "utf-8")
        with pytest.raises(RunError, match=r"policy\.weights\.safetensors cannot be read"):
            verify(run_dir, console)


def test_logs_that_lost_lines_are_named(run_dir: Path, console: Console) -> None:
    (run_dir / "metrics.jsonl").write_text("", "utf-8")
    with pytest.raises(RunError, match=r"metrics\.jsonl has 0 bytes, the checkpoint of step 1"):
        verify(run_dir, console)
