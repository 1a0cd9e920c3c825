"""A learner and an engine, two processes on one card of 24 GB, and what they leave each other."""

from pathlib import Path
from typing import Any

import pytest

from helpers.gpu_stub import Stub
from helpers.stub_results import Results

pytestmark = pytest.mark.gpu_stub
SCRIPT = str(Path(__file__).parent / "handover.py")
STEPS = {"small": 5, "0.6B": 2}  # of handover.py
# Pages in use in part: torch maps segments by 20 MiB, those of small tensors by 2. Of a small model
# they are more than a twentieth.
PAGES = {"small": 42 * 2**20, "0.6B": 0}


def run(stub: Stub, folder: Path, *arguments: str) -> dict[str, Any]:
    card = {"STUB_MEM": "24", "STUB_CARD": str(folder / "card")}
    return stub.ask(SCRIPT, str(folder), *arguments, **card)


@pytest.mark.parametrize("size", STEPS)
def test_both_survive_and_give_back_what_they_do_not_hold(
    stub: Stub, results: Results, size: str, tmp_path: Path
) -> None:
    found = run(stub, tmp_path, size)
    assert found["error"] is None
    turns = found["turns"]
    owners = [owner for owner, *_ in turns]
    # loading the roles, then the job; before, within and after the publish of the start and of each
    # step; after each step's updates, and before the save
    assert owners.count("learner") == 2 + 3 * (1 + STEPS[size]) + STEPS[size] + 1
    assert owners.count("engine") == 1 + STEPS[size]
    for owner, allocated, reserved in turns:
        assert reserved <= 1.05 * allocated + PAGES[size], (owner, allocated, reserved)
    last = {owner: [allocated, reserved] for owner, allocated, reserved in turns}
    results.keep("hand-over on 24 GB", last, size)


def test_without_giving_back_they_run_out_of_memory(stub: Stub, tmp_path: Path) -> None:
    found = run(stub, tmp_path, "small", "keep")
    assert "out of memory" in found["error"]
    learner = [reserved for owner, _, reserved in found["turns"] if owner == "learner"]
    assert len(learner) < 1 + 3 * (1 + STEPS["small"])
