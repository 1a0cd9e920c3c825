"""Runs behind Ray in whose saves a rank is killed, or all ranks, or the process that commits: what
stands is whole, and the run that goes on ends with the bits of one that was never killed.
"""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from helpers.faults import HERE
from helpers.jobs import write_recipe
from postgrad.checkpoint.settings import CheckpointSettings
from postgrad.checkpoint.store import CheckpointStore
from postgrad.tools.verify_resume import fingerprint

pytest.importorskip("ray")
pytestmark = [pytest.mark.ranks, pytest.mark.slow]

SECONDS = 900.0  # a machine that is shared
LEARNER = 'lr = 1e-2\nranks = 2\nsharding = "zero3"\n'
CLUSTER = '[cluster]\ntype = "ray"\nstart_seconds = 600.0\nmax_restarts = 0\n'
CALL = "import sys; from postgrad.cli.main import main; sys.exit(main())"


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = write_recipe("sft", tmp_path)
    text = path.read_text("utf-8").replace("lr = 1e-2\n", LEARNER)
    path.write_text(text + CLUSTER, "utf-8")
    return path


def start(recipe: Path, run: Path, *more: str) -> subprocess.Popen[bytes]:
    paths = [str(HERE.parent), os.environ.get("PYTHONPATH", "")]
    words = ["train", str(recipe), "--run_dir", str(run), "--steps", "12", "--quiet", *more]
    return subprocess.Popen(
        [sys.executable, "-c", CALL, *words],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
        stderr=subprocess.PIPE,
    )


def finish(process: subprocess.Popen[bytes]) -> tuple[int, str]:
    _, told = process.communicate(timeout=SECONDS)
    return process.returncode, told.decode()


def ends_well(process: subprocess.Popen[bytes]) -> None:
    """Ray may have a word of its own."""
    status, told = finish(process)
    assert status == 0, told


def wait_for_save(process: subprocess.Popen[bytes], run: Path) -> list[psutil.Process]:
    """Until a checkpoint is being written; the ranks that do."""
    folder, end = run / "checkpoints", time.monotonic() + SECONDS
    ranks: list[psutil.Process] = []
    while time.monotonic() < end and process.poll() is None:
        if len(ranks) < 2:
            ranks = ranks_of(process)
        elif any(folder.glob(".saving-*/*")):
            return ranks
        time.sleep(0.05 if len(ranks) < 2 else 0.001)  # a save takes some milliseconds
    raise AssertionError(f"nothing was saved: {finish(process)}")


def ranks_of(process: subprocess.Popen[bytes]) -> list[psutil.Process]:
    """The actors of its Ray."""
    found: list[psutil.Process] = []
    for one in psutil.Process(process.pid).children(recursive=True):
        try:
            title = " ".join(one.cmdline())
        except psutil.Error:
            continue
        if title.startswith("ray::_Worker"):
            found.append(one)
    return found


@pytest.fixture
def wanted(recipe: Path, tmp_path: Path) -> dict[str, str]:
    whole = tmp_path / "whole"
    ends_well(start(recipe, whole))
    return fingerprint(whole)


@pytest.mark.parametrize(
    "killed", [("a rank", "the run"), pytest.param(("all ranks",), marks=pytest.mark.long)]
)
def test_whoever_is_killed_in_a_save_the_run_that_goes_on_ends_with_the_same_bits(
    killed: tuple[str, ...], recipe: Path, wanted: dict[str, str], tmp_path: Path
) -> None:
    assert sum(".rank-" in name for name in wanted) == 4  # two ranks, weights and optimizer
    run = tmp_path / "run"
    for whom in killed:
        process = start(recipe, run)
        ranks = wait_for_save(process, run)
        victims = {"a rank": ranks[1:], "all ranks": ranks, "the run": []}[whom]
        if whom == "the run":
            process.send_signal(signal.SIGKILL)
        for one in victims:
            one.kill()
        status, told = finish(process)
        if whom == "the run":
            assert status == -9
        else:
            assert status == 1
            assert "died" in told
        psutil.wait_procs(ranks, timeout=60.0)  # Ray ends what its run has left
        store = CheckpointStore(run / "checkpoints", CheckpointSettings())
        if store.steps():
            assert store.load().skipped == ()
    ends_well(start(recipe, run))
    assert fingerprint(run) == wanted


def test_ranks_whose_machine_is_lost_go_on_from_the_mirror_with_the_same_bits(
    recipe: Path, wanted: dict[str, str], tmp_path: Path
) -> None:
    run, folder = tmp_path / "run", tmp_path / "mirror"
    mirror = ("--checkpoint.mirror", folder.as_uri())
    process = start(recipe, run, *mirror)
    while process.poll() is None and not any(folder.glob("checkpoints/*/manifest.json")):
        time.sleep(0.01)
    ranks = ranks_of(process)
    process.send_signal(signal.SIGKILL)
    assert finish(process)[0] == -9
    psutil.wait_procs(ranks, timeout=60.0)
    shutil.rmtree(run)
    ends_well(start(recipe, run, *mirror))
    assert fingerprint(run) == wanted
    assert '"restored"' in (run / "events.jsonl").read_text("utf-8")
    [newest] = folder.glob("checkpoints/step-000012")
    assert sum(".rank-" in path.name for path in newest.iterdir()) == 4
