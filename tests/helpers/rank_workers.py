"""Workers for groups of ranks that go wrong in known ways."""

import os
import signal
import time
from typing import Any

from postgrad.core.errors import RunError
from postgrad.jobs.ranks.worker import RankWorker


class Misbehaving:
    """Joins nobody. Its methods act on one rank; the others answer, or wait for ever."""

    def __init__(self, greeting: str) -> None:
        self._greeting = greeting
        self._rank = -1
        self._said: list[Any] = []

    def join(self, rank: int, size: int, address: str, device: str, limit_seconds: float) -> None:
        self._rank = rank

    def greet(self, name: str) -> str:
        return f"{self._greeting} {name} from {self._rank}"

    def remember(self, value: Any) -> list[Any]:
        self._said.append(value)
        return list(self._said)

    def fail(self, rank: int) -> None:
        if self._rank == rank:
            raise RunError(f"the gradient of rank {rank} is not finite")
        time.sleep(3600)

    def stumble(self, rank: int) -> None:
        if self._rank == rank:
            raise ZeroDivisionError("division by zero")

    def wait_in_vain(self, rank: int) -> None:
        if self._rank != rank:
            raise RunError(f"rank {self._rank} of 2 waited in vain in 'x': missing: rank {rank}")
        time.sleep(0.5)
        raise RunError(f"rank {rank} has no memory left")

    def hang(self, rank: int) -> None:
        if self._rank != rank:
            raise RunError(f"rank {self._rank} of 2 waited in vain in 'x': Timed out waiting")
        time.sleep(3600)

    def die(self, rank: int) -> None:
        if self._rank == rank:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(3600)

    def full(self) -> None:
        raise OSError(28, "No space left on device")


class Other(RankWorker):
    """On rank 1 with another seed, as of a machine with another version of postgrad."""

    def join(self, rank: int, *more: Any) -> None:
        if rank == 1:
            self._place.recipe = self._place.recipe.model_copy(update={"seed": 7})
        super().join(rank, *more)
