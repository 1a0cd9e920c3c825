"""Runs with samples ahead, killed at random times again and again: each ticket once, the same bits.

`--random-kills N` says how many kills there are over the three values of max_staleness (CI: 6;
`make test-faults`: 2 000).
"""

import time
from pathlib import Path

import pytest

from helpers.faults import Fault, Machine
from helpers.random_kills import STEPS, fates, kill_runs, train, write
from postgrad.tools.verify_resume import fingerprint

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("staleness", [1, pytest.param(2, marks=pytest.mark.long), 4])
def test_killed_runs_have_each_ticket_once_and_the_bits_of_one_that_nobody_kills(
    staleness: int, request: pytest.FixtureRequest, machine: Machine, tmp_path: Path
) -> None:
    kills = -(-int(request.config.getoption("--random-kills")) // 3)
    recipe, run = write(tmp_path / "killed", staleness, STEPS), tmp_path / "run"
    train(machine, recipe, run, Fault())
    began = time.monotonic()
    again = tmp_path / "again"
    assert train(machine, recipe, again, Fault())
    seconds = time.monotonic() - began  # of a run whose modules are imported
    wanted = fingerprint(run)
    assert fingerprint(again) == wanted
    assert {"policy.weights.safetensors", "pending.safetensors", "samples.jsonl"} <= set(wanted)
    assert set(fates(run)) == {"trained", "filtered", "failed"}
    counted = kill_runs(machine, recipe, kills, life=seconds, seed=staleness, wanted=wanted)
    assert (counted.kills, sum(counted.steps.values())) == (kills, kills)
    assert counted.runs >= 1
