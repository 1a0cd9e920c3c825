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
from helpers.runs import whole_lines
from postgrad.checkpoint.settings import CheckpointSettings
from postgrad.checkpoint.store import CheckpointStore
from postgrad.tools.verify_resume import fingerprint

ray = pytest.importorskip("ray")
pytestmark = [pytest.mark.ranks, pytest.mark.slow]

SECONDS = 900.0  # a machine that is shared
LEARNER = 'lr = 1e-2\nranks = 2\nsharding = "zero3"\n'
CLUSTER = '[cluster]\ntype = "ray"\nstart_seconds = 600.0\nmax_restarts = 0\n'
CALL = "import sys; from postgrad.cli.main import main; sys.exit(main())"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("recipe")


@pytest.fixture
def recipe(folder: Path, ray_cluster: None) -> Path:
    """Runs join a cluster that outlives them, which ends what a run that is killed has left there.
    That a cluster of its own ends with its run is tested in tests/cluster/test_bad_days.py.
    """
    path = write_recipe("sft", folder)
    text = path.read_text("utf-8").replace("lr = 1e-2\n", LEARNER)
    address = ray.get_runtime_context().gcs_address
    path.write_text(f'{text}{CLUSTER}address = "{address}"\n', "utf-8")
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
    _, stderr = process.communicate(timeout=SECONDS)
    return process.returncode, stderr.decode()


def ends_well(process: subprocess.Popen[bytes]) -> None:
    """Ray may have a word of its own."""
    status, stderr = finish(process)
    assert status == 0, stderr


def wait_for_save(process: subprocess.Popen[bytes], run: Path) -> list[psutil.Process]:
    """Until a checkpoint is being written; the ranks that do."""
    folder, end = run / "checkpoints", time.monotonic() + SECONDS
    ranks: list[psutil.Process] = []
    while time.monotonic() < end and process.poll() is None:
        if len(ranks) < 2:
            ranks = ranks_of(run)
        elif any(folder.glob(".saving-*/*")):
            return ranks
        time.sleep(0.05 if len(ranks) < 2 else 0.001)  # a save takes some milliseconds
    raise AssertionError(f"nothing was saved: {finish(process)}")


def ranks_of(run: Path) -> list[psutil.Process]:
    """Those that are there, of all that the run has started."""
    events = whole_lines(run / "events.jsonl")
    places = [place for event in events if event["event"] == "placed" for place in event["places"]]
    return [psutil.Process(pid) for _, pid in places if psutil.pid_exists(pid)]


@pytest.fixture
def wanted(recipe: Path, folder: Path) -> dict[str, str]:
    """Of the run that was never killed, which all tests share."""
    unharmed = folder / "unharmed"
    if not unharmed.exists():
        ends_well(start(recipe, unharmed))
    return fingerprint(unharmed)


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
        for victim in victims:
            victim.kill()
        status, stderr = finish(process)
        if whom == "the run":
            assert status == -9
        else:
            assert status == 1
            assert "died" in stderr
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
    ranks = ranks_of(run)
    process.send_signal(signal.SIGKILL)
    assert finish(process)[0] == -9
    psutil.wait_procs(ranks, timeout=60.0)
    shutil.rmtree(run)
    ends_well(start(recipe, run, *mirror))
    assert fingerprint(run) == wanted
    assert '"restored"' in (run / "events.jsonl").read_text("utf-8")
    [newest] = folder.glob("checkpoints/step-000012")
    assert sum(".rank-" in path.name for path in newest.iterdir()) == 4
