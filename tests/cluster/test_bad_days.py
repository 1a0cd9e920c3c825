"""Bad days of whole runs: one message with the cause, exit code 1, nothing left behind."""

import os
import signal
import socket
import subprocess
import sys
import time
import uuid
from pathlib import Path
from typing import Any

import pytest

from helpers.jobs import MODEL
from helpers.processes import SECONDS, all_gone, environment, left_of, postgrad
from helpers.runs import lines
from postgrad.cluster.connection import Reservation
from postgrad.cluster.placing import RoleRequest
from postgrad.cluster.settings import ClusterSettings
from postgrad.cluster.workers import RankGroup
from postgrad.core.errors import RunError
from postgrad.fleet.choices import choose
from postgrad.recipe.load import load_recipe

pytest.importorskip("ray")
pytestmark = [pytest.mark.ranks, pytest.mark.slow]

RECIPE = (
    """
job = "sft"
run_dir = "{folder}/run"
steps = 3
"""
    + MODEL
    + """[data]
path = "reasoning-gym:spell_backward"
size = 40
max_len = 96
[batch]
train_batch_size = 8
[learner]
ranks = 2
threads = 1
[cluster]
type = "ray"
start_seconds = 600.0
"""
)


@pytest.fixture
def recipe(tmp_path: Path) -> str:
    path = tmp_path / "recipe.toml"
    path.write_text(RECIPE.format(folder=tmp_path))
    return str(path)


def shared_memory() -> set[str]:
    """Names that Ray and torch have taken there and that no living process maps: another test may
    run a cluster of its own at the same time.
    """
    names = os.listdir("/dev/shm") if Path("/dev/shm").is_dir() else []  # noqa: PTH208
    mapped = "".join(map(maps, Path("/proc").glob("[0-9]*/maps")))
    ours = (name for name in names if name.startswith(("plasma", "torch", "ray")))
    return {name for name in ours if f"/dev/shm/{name}" not in mapped}


def maps(path: Path) -> str:
    """What a process maps; "" of one that has ended, or that is not for this user to see."""
    try:
        return path.read_text()
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return ""


def fails(recipe: str, *flags: str) -> str:
    """The message of a run that has to end with exit code 1 and leave nothing."""
    before = shared_memory()
    ended = postgrad("train", recipe, *flags, "--quiet")
    assert ended.code == 1, ended.message
    assert all_gone(ended.mark) == []
    assert shared_memory() <= before
    return ended.message


def test_an_address_that_nobody_answers(recipe: str) -> None:
    message = fails(recipe, "--cluster.address", "127.0.0.1:1")
    assert message.startswith(
        "postgrad: no Ray cluster at 127.0.0.1:1: Connection refused; start one"
    )


@pytest.mark.long
def test_a_port_in_use(recipe: str) -> None:
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        message = fails(recipe, "--cluster.port", str(port))
    assert "rank 0 of 2 could not join the others at " in message
    assert f":{port} within " in message
    assert "address already in use" in message


@pytest.mark.long
def test_one_rank_out_of_memory(recipe: str, tmp_path: Path) -> None:
    message = fails(recipe, "--algorithm.type", "helpers.bad_algorithms:Hungry")
    assert message.startswith("postgrad: out of memory in train of step 1: rank 1 failed: ")
    assert "can't allocate memory" in message
    assert [event["event"] for event in lines(tmp_path / "run" / "events.jsonl")].count(
        "restarted"
    ) == 0


def test_a_rank_that_hangs_is_named_long_before_the_limit_of_a_collective(recipe: str) -> None:
    message = fails(recipe, "--algorithm.type", "helpers.bad_algorithms:Hangs")
    assert message.startswith("postgrad: rank 1 (pid ")
    assert " seconds it has computed nothing at " in message
    assert "bad_algorithms.py:" in message
    assert " in policy_loss, while rank 0 waited for it at " in message


@pytest.mark.long
def test_a_rank_that_dies_again_and_again_ends_the_run(recipe: str, tmp_path: Path) -> None:
    died = tmp_path / "died"
    flags = ["--algorithm.type", "helpers.bad_algorithms:Dies", "--algorithm.died", str(died)]
    message = fails(recipe, *flags, "--cluster.max_restarts", "1")
    assert message.startswith("postgrad: rank 1 died: ")
    assert "nothing was saved yet; cluster.max_restarts = 1: it is not restarted" in message
    assert died.read_text() == "xx"
    events = [event["event"] for event in lines(tmp_path / "run" / "events.jsonl")]
    assert events.count("restarted") == 1


def test_a_first_process_that_is_killed_leaves_no_other(recipe: str, tmp_path: Path) -> None:
    mark = uuid.uuid4().hex
    words = [sys.executable, "-m", "postgrad", "train", recipe, "--quiet", "--steps", "100000"]
    process = subprocess.Popen(words, env=environment(mark), stderr=subprocess.DEVNULL)
    metrics, end = tmp_path / "run" / "metrics.jsonl", time.monotonic() + SECONDS
    while not (metrics.exists() and metrics.read_text()) and process.poll() is None:
        assert time.monotonic() < end
        time.sleep(0.1)
    assert len(left_of(mark)) > 3
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert all_gone(mark) == []


@pytest.mark.usefixtures("ray_cluster")
def test_ranks_that_disagree_on_the_recipe(recipe: str) -> None:
    loaded = load_recipe(Path(recipe), [])
    settings = ClusterSettings(type="ray", start_seconds=600.0, limit_seconds=30.0)
    held = Reservation([RoleRequest("policy", "learner.ranks = 2", 2)], 600.0)
    arguments: tuple[Any, ...] = (loaded.dump(), choose(loaded, {}))
    with pytest.raises(RunError, match=r"rank 1 and rank 0 disagree on the recipe \(its SHA"):
        RankGroup("helpers.other_rank:Other", arguments, 2, "cpu", settings, held)
    held.close()
