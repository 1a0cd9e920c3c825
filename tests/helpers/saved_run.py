"""A run directory as a run leaves it that saved every step, made without training."""

import errno
import hashlib
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

from helpers.saves import state, tensors
from postgrad.checkpoint.settings import CheckpointSettings
from postgrad.checkpoint.state import RunState
from postgrad.checkpoint.store import CheckpointStore
from postgrad.cli.main import main
from postgrad.core import files
from postgrad.observe.run_dir import RunDirectory
from postgrad.observe.sinks import Logs
from postgrad.recipe.load import recipe_from_json

IMAGE = hashlib.sha256(b"picture").hexdigest()
WEIGHTS = "policy.weights.safetensors"


class SavedRun:
    """Logs and checkpoints are written as a run writes them."""

    def __init__(self, path: Path) -> None:
        """Opens the one in `path`."""
        self.path = path
        self.directory = RunDirectory.open(path)
        self.logs = Logs(path, compress=True)
        self.store = CheckpointStore(path / "checkpoints", CheckpointSettings(max_ckpt_num=9))

    @classmethod
    def create(cls, path: Path, recipe: Any, steps: int = 0) -> "SavedRun":
        """One of so many steps, of which the second was the best."""
        RunDirectory.create(path, recipe.dump(), overwrite=False)
        (path / "images").mkdir()
        (path / "images" / IMAGE).write_bytes(b"picture")
        (path / "images" / f".{IMAGE}.4711.tmp").write_bytes(b"pic")
        (path / "init").mkdir()
        (path / "init" / "config.json").write_text("{}", "utf-8")
        (path / "tokenizer.json").write_text("[]", "utf-8")
        (path / "model").mkdir()
        (path / "summary.json").write_text("{}", "utf-8")
        run = cls(path)
        for number in range(1, steps + 1):
            run.step(number)
        return run

    def copied(self, to: Path) -> "SavedRun":
        """Another one of the same files."""
        return SavedRun(shutil.copytree(self.path, to))

    def step(self, number: int, best: int = 2, **more: Any) -> None:
        """Logs and saves a step. more: fields of its state."""
        self.logs.metric({"step": number, "loss": 0.5})
        self.logs.samples([{"step": number, "text": "x" * 50}])
        held: RunState = replace(state(number, min(number, best)), log_offsets=self.logs.sync())
        self.store.save(replace(held, **more), tensors(number), best=number == best)
        self.logs.event("saved", f"step {number}", step=number)
        self.logs.close()  # whoever writes next opens them again

    def change(self, key: str, value: float) -> None:
        """Changes learner.KEY as a resume does."""
        kept = self.directory.keep_recipe()
        self.logs.event("recipe_changed", key, kept=kept.name)
        raw = recipe_from_json(self.directory.recipe()).dump()
        raw["learner"][key] = value
        self.directory.write_recipe(raw)
        self.logs.close()


def fork_it(run: str, to: str, links: bool) -> int:
    """`postgrad fork`; without `links` on a disk that has no hard links."""
    if not links:
        files.os.link = _no_link
    return main(["fork", run, "--to", to, "--json"])


def _no_link(*_: Any, **__: Any) -> None:
    raise OSError(errno.EPERM, os.strerror(errno.EPERM))
