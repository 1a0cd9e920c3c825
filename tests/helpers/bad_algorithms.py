"""Algorithms that go wrong on one rank, as a user's own might."""

import os
import signal
import time
from pathlib import Path

import torch
import torch.distributed as dist

from postgrad.algorithms.base import LossInputs, LossOutput
from postgrad.algorithms.sft import SFT


def on_rank_1() -> bool:
    """Not in the first process, which is no rank."""
    return dist.is_initialized() and dist.get_rank() == 1


class Hangs(SFT):
    """Rank 1 never comes out of its loss."""

    def policy_loss(self, inputs: LossInputs) -> LossOutput:
        if on_rank_1():
            time.sleep(3600)
        return super().policy_loss(inputs)


class Hungry(SFT):
    """Rank 1 asks for more memory than any machine has."""

    def policy_loss(self, inputs: LossInputs) -> LossOutput:
        if on_rank_1():
            torch.empty(2**60, dtype=torch.uint8)
        return super().policy_loss(inputs)


class Dies(SFT):
    """Rank 1 is killed in its loss, as often as it is begun; each time adds a byte to `died`."""

    died: str

    def policy_loss(self, inputs: LossInputs) -> LossOutput:
        if on_rank_1():
            with Path(self.died).open("a") as file:
                file.write("x")
            os.kill(os.getpid(), signal.SIGKILL)
        return super().policy_loss(inputs)
