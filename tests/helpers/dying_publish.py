"""Ranks and engines that send many small parcels, and die within a publish where a file asks one of
them to: the first that comes to its second parcel removes the file and kills itself.
"""

import hashlib
import os
import signal
from pathlib import Path
from typing import Any

import torch

from postgrad.fleet import sending
from postgrad.fleet.engines import EngineWorker
from postgrad.fleet.worker import RankWorker
from postgrad.rollout.local.engine import LocalEngine

RANKS = "helpers.dying_publish:SendsLittle"
ENGINES = "helpers.dying_publish:TellsBits"
FOLDER = "POSTGRAD_TEST_DEATHS"  # where the files are


def ask_for_a_death(folder: Path, whose: str) -> None:
    (folder / whose).touch()


def _die_if_asked(whose: str) -> None:
    try:
        (Path(os.environ[FOLDER]) / whose).unlink()
    except FileNotFoundError:
        return
    os.kill(os.getpid(), signal.SIGKILL)


def digest(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.detach().contiguous().view(torch.uint8).numpy()).hexdigest()


class SendsLittle(RankWorker):
    """4 kB at a time."""

    sent = 0

    def publish(self, action: str, *arguments: Any) -> Any:
        sending.BUCKET = 4096
        self.sent = 0 if action == "open" else self.sent + (action == "next")
        if self.sent == 2 and self._ranks.rank == 1:
            _die_if_asked("rank")
        return super().publish(action, *arguments)


class TellsBits(EngineWorker):
    """Its weights by name, as digests of their bits."""

    taken = 0

    def publish(self, action: str, *arguments: Any) -> Any:
        self.taken = 0 if action == "begin" else self.taken + (action == "take")
        if self.taken == 2:
            _die_if_asked("engine")
        return super().publish(action, *arguments)

    def bits(self) -> dict[str, str]:
        assert isinstance(self._engine, LocalEngine)
        return {name: digest(weight) for name, weight in self._engine._lm.named_parameters()}
