"""Whole runs on a bad machine: whatever happens, what is resumed ends with the same bits.

`--fault-points N` says how many kills a job gets (CI: 3; `make test-faults`: 200), and a fifth of
that of each other fault; in CI, of one of them.
"""

import json
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from helpers.faults import FOREVER, Ended, Fault, Kind, Machine
from helpers.jobs import JOBS, write_recipe
from postgrad.checkpoint.settings import CheckpointSettings
from postgrad.checkpoint.store import CheckpointStore
from postgrad.core.seeds import uniform
from postgrad.tools.verify_resume import fingerprint

pytestmark = pytest.mark.slow


@pytest.fixture
def points(request: pytest.FixtureRequest) -> int:
    return int(request.config.getoption("--fault-points"))


def train(machine: Machine, recipe: Path, run: Path, fault: Fault) -> Ended:
    words = ["train", str(recipe), "--run_dir", str(run), "--quiet"]
    if fault.kind == Kind.FULL and fault.last == FOREVER:  # there is nothing to wait for
        words += ["--checkpoint.wait_for_room_minutes", "0"]
    return machine.call("helpers.faults:command", [words], run, fault)


def kills(points: int, calls: int, seconds: float, job: str) -> Iterator[Fault]:
    """Three of four at calls, spread evenly from a place of the job's own; the others at any time,
    most of them while it computes.
    """
    at_calls = max(1, points * 3 // 4)
    shift = float(uniform(0, job))
    for i in range(at_calls):
        number = 1 + int((i + shift) * calls / at_calls)
        yield Fault(Kind.KILL, number, number)
    for i in range(points - at_calls):
        yield Fault(seconds=seconds * float(uniform(i, job)))


def other_faults(points: int, calls: int, job: str) -> Iterator[Fault]:
    """A bad sector at one call; a disk that is full for a while, and for good."""
    for i in range(max(1, points // 5)):
        number = 1 + int(uniform(i, f"{job} other") * calls)
        faults = (
            Fault(Kind.IO_ERROR, number, number),
            Fault(Kind.FULL, number, number + 30),
            Fault(Kind.FULL, number, FOREVER),
        )
        yield from faults if points >= 5 else [faults[list(JOBS).index(job) % 3]]


def check_what_is_there(run: Path) -> None:
    """Nothing is damaged but what was being written."""
    store = CheckpointStore(run / "checkpoints", CheckpointSettings())
    if store.steps():
        assert store.load().skipped == ()


def check_told(ended: Ended) -> None:
    """A failure is one message for people."""
    assert ended.status in (0, 1)
    assert "Traceback" not in ended.message
    assert "please report" not in ended.message
    assert ("postgrad: " in ended.message) == (ended.status == 1)


def jobs(*before_every_change: str) -> list[Any]:
    """All of them; those that are not named here are long tests."""
    assert set(before_every_change) <= set(JOBS)
    return [
        pytest.param(job, marks=() if job in before_every_change else pytest.mark.long)
        for job in JOBS
    ]


# Between them these have every kind of state that a checkpoint holds.
STATES = (
    "grpo with kl and ema", "dapo with a reference that follows",
    "grpo of stale samples", "ppo", "reward model with lora", "dpo",
)  # fmt: skip


@pytest.mark.parametrize("job", jobs(*STATES))
def test_whatever_happens_the_run_that_goes_on_ends_with_the_same_bits(
    job: str, points: int, machine: Machine, tmp_path: Path
) -> None:
    recipe, run = write_recipe(job, tmp_path), tmp_path / "run"
    began = time.monotonic()
    unharmed = train(machine, recipe, run, Fault())
    seconds = time.monotonic() - began
    assert unharmed.status == 0, unharmed.message
    wanted = fingerprint(run)
    roles = [JOBS[job].role, *(["critic"] if job == "ppo" else [])]
    files = {f"{role}.{part}.safetensors" for role in roles for part in ("weights", "optimizer")}
    assert files <= set(wanted)
    assert {"state.json", "metrics.jsonl", "eval.jsonl"} <= set(wanted)
    assert (f"{JOBS[job].role}.ema.safetensors" in wanted) == ("ema" in job)
    killed = 0
    calls = len(unharmed.names)
    for fault in (*kills(points, calls, seconds, job), *other_faults(points, calls, job)):
        shutil.rmtree(run)
        ended = train(machine, recipe, run, fault)
        if ended.status == -9:
            killed += 1
        else:
            check_told(ended)
        check_what_is_there(run)
        again = train(machine, recipe, run, Fault())
        assert (again.status, again.message) == (0, ""), (fault, ended)
        assert fingerprint(run) == wanted, (fault, ended)
        for line in (run / "events.jsonl").read_text("utf-8").splitlines():
            assert "event" in json.loads(line)
    assert killed >= points * 3 // 4


@pytest.mark.parametrize("job", jobs("dpo"))
def test_a_disk_that_is_full_when_a_run_ends_is_waited_for(
    job: str, machine: Machine, tmp_path: Path
) -> None:
    """It has room again after 31 calls, the first of which makes the last checkpoint's folder."""
    recipe, well, ill = write_recipe(job, tmp_path), tmp_path / "well", tmp_path / "ill"
    names = train(machine, recipe, well, Fault()).names
    first = names.rindex("M") + 1
    ended = train(machine, recipe, ill, Fault(Kind.FULL, first, first + 30))
    assert ended.status == 0, ended.message
    assert ended.message.count("the last save of the run waits for room") == 1
    assert fingerprint(ill) == fingerprint(well)
    events = [json.loads(line) for line in (ill / "events.jsonl").open(encoding="utf-8")]
    assert [event["step"] for event in events if event["event"] == "waiting_for_room"] == [4]


@pytest.mark.parametrize("kind", [Kind.SHORT, Kind.SLOW], ids=["short writes", "slow disk"])
@pytest.mark.parametrize("job", jobs("dpo"))
def test_short_writes_and_a_slow_disk_change_nothing(
    job: str, kind: Kind, machine: Machine, tmp_path: Path
) -> None:
    recipe, well, ill = write_recipe(job, tmp_path), tmp_path / "well", tmp_path / "ill"
    train(machine, recipe, well, Fault())
    ended = train(machine, recipe, ill, Fault(kind, 1, FOREVER))
    assert (ended.status, ended.message) == (0, "")
    assert fingerprint(ill) == fingerprint(well)
