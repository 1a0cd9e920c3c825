"""Workers for groups of ranks that go wrong in known ways. Free of models, whose import takes each
of them seconds.
"""

import os
import signal
import subprocess
import sys
import time
from typing import Any

import torch

from postgrad.core.errors import RunError
from postgrad.parallel.ranks import Ranks

# As torch 2.11 and 2.13 word it; the times of the log lines are left out.
WATCHDOG = """[rank{rank}]:[E ProcessGroupNCCL.cpp:684] [Rank {rank}] Watchdog caught collective \
operation timeout: WorkNCCL(SeqNum=7753, OpType=_REDUCE_SCATTER_BASE, NumelIn=544997376, \
NumelOut=68124672, Timeout(ms)=600000) ran for 600061 milliseconds before timing out.
[rank{rank}]:[E ProcessGroupNCCL.cpp:698] [Rank {rank}] To avoid data inconsistency, we are taking \
the entire process down.
"""
NOTICED = """[rank1]:[E ProcessGroupNCCL.cpp:1682] [PG ID 0 PG GUID 0(default_pg) Rank 1] Observed \
flight recorder dump signal from another rank via TCPStore.
"""


class Misbehaving:
    """Joins nobody. Its methods act on one rank; the others answer, or wait for ever."""

    def __init__(self, greeting: str) -> None:
        self._greeting = greeting
        self._rank = -1
        self._values: list[Any] = []

    def join(self, rank: int, size: int, address: str, device: str, limit_seconds: float) -> None:
        self._rank = rank

    def greet(self, name: str) -> str:
        return f"{self._greeting} {name} from {self._rank}"

    def remember(self, value: Any) -> list[Any]:
        self._values.append(value)
        return list(self._values)

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

    def is_ended_by_nccl(self, late: int, notices: bool) -> None:
        """As torch's watchdog ends a process whose collective timed out. notices: it ends the rank
        that did not come as well.
        """
        time.sleep(3.0)  # in which somebody looks where everybody is
        if self._rank != late:
            os.write(2, WATCHDOG.format(rank=self._rank).encode())
        elif notices:
            os.write(2, NOTICED.encode())
        else:
            time.sleep(3600)
        os.abort()

    def lose(self, rank: int, words: str) -> None:
        if self._rank == rank:
            raise RunError(f"rank {rank} of 2 waited in vain in 'x': torch says: {words}")

    def abort(self, rank: int) -> None:
        if self._rank == rank:
            os.abort()
        time.sleep(3600)

    def full(self) -> None:
        raise OSError(28, "No space left on device")


class Meeting:
    """Ranks that add a number up, to which one of them comes late."""

    _ranks: Ranks

    def join(self, rank: int, size: int, address: str, device: str, limit_seconds: float) -> None:
        self._ranks = Ranks.join(rank, size, address, limit_seconds=limit_seconds)

    def meet(self, late: int, how: str, seconds: float) -> float:
        if self._ranks.rank == late:
            getattr(self, how)(seconds)
        with self._ranks.doing("the meeting"):
            return self._ranks.sum(1.0)

    def sleeps(self, seconds: float) -> None:
        time.sleep(seconds)

    def computes(self, seconds: float) -> None:
        """For so long by the clock, whatever the machine is busy with."""
        end, matrix = time.monotonic() + seconds, torch.ones(64, 64)
        while time.monotonic() < end:
            torch.mm(matrix, matrix)

    def keeps_the_interpreter(self, seconds: float) -> None:
        """Computes too, and lets no other thread say so: each power takes a second or so."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            _ = (7**2_000_000) ** 2

    def starts_another(self, seconds: float) -> None:
        """Waits for a process of its own that computes."""
        words = "import time\nend = time.monotonic() + {}\nwhile time.monotonic() < end: pass"
        subprocess.run([sys.executable, "-c", words.format(seconds)], check=True)

    def is_stopped(self, seconds: float) -> None:
        os.kill(os.getpid(), signal.SIGSTOP)
        time.sleep(60.0)  # another thread takes the signal, and may have to wait for a processor
