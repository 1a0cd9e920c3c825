"""Processes that form a group of ranks over gloo on this machine."""

import multiprocessing
import os
from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import cache
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

import pytest
import torch

from postgrad.core.process import held_port
from postgrad.parallel.ranks import UNDIVIDED, Grid, Ranks

Work = Callable[..., None]  # (ranks, folder, *more)
SECONDS = 900.0  # a machine that is shared
PRELOADED = "helpers.preloaded"
TESTS = Path(__file__).parent.parent


@contextmanager
def meeting() -> Generator[str]:
    """HOST:PORT where ranks can meet, and nobody else."""
    held, port = held_port()
    with held:
        yield f"127.0.0.1:{port}"


@cache
def forks() -> ForkServerContext:
    """Starts processes as forks of one that has imported what takes long and run nothing."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([PRELOADED])
    with pytest.MonkeyPatch.context() as patch:
        folders = [str(TESTS), os.environ.get("PYTHONPATH")]
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, folders)))
        patch.setenv("OMP_NUM_THREADS", "1")
        forkserver.ensure_running()
    return context


def run_ranks(
    size: int,
    work: Work,
    folder: Path,
    *more: Any,
    limit_seconds: float = 200.0,
    grid: Grid = UNDIVIDED,
) -> None:
    """Runs `work` on so many ranks, each a fresh fork; an error of one is an AssertionError with
    its text. Results are files in `folder`.
    """
    with meeting() as address:
        processes = [
            forks().Process(
                target=_main,
                args=(work, rank, size, address, folder, limit_seconds, grid, more),
                daemon=True,
            )
            for rank in range(size)
        ]
        for process in processes:
            process.start()
        for process in processes:
            process.join(SECONDS)
    left = [process for process in processes if process.is_alive()]
    for process in left:
        process.kill()
        process.join()
    failures = [path.read_text() for path in sorted(folder.glob("failed-*"))]
    codes = [process.exitcode for process in processes]
    assert not failures, "\n".join([f"exit codes: {codes}", *failures])
    assert not left, f"{len(left)} of {size} ranks did not end"
    assert codes == [0] * size


def _main(
    work: Work,
    rank: int,
    size: int,
    address: str,
    folder: Path,
    limit_seconds: float,
    grid: Grid,
    more: tuple[Any, ...],
) -> None:
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    try:
        ranks = (
            Ranks.join(rank, size, address, limit_seconds=limit_seconds, grid=grid)
            if size > 1
            else Ranks()
        )
        work(ranks, folder, *more)
        ranks.leave()
    except BaseException:
        import traceback

        (folder / f"failed-{rank}").write_text(f"rank {rank}:\n{traceback.format_exc()}")
        raise
