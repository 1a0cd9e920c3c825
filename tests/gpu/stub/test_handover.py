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
def test_both_survive_and_free_what_they_do_not_hold(
    stub: Stub, results: Results, size: str, tmp_path: Path
) -> None:
    memory = run(stub, tmp_path, size)
    assert memory["error"] is None
    turns = memory["turns"]
    owners = [owner for owner, *_ in turns]
    # loading the roles, then the job; before, within and after the publish of the start and of each
    # step; after each step's updates, and before the save
    assert owners.count("learner") == 2 + 3 * (1 + STEPS[size]) + STEPS[size] + 1
    assert owners.count("engine") == 1 + STEPS[size]
    for owner, allocated, reserved in turns:
        assert reserved <= 1.05 * allocated + PAGES[size], (owner, allocated, reserved)
    last = {owner: [allocated, reserved] for owner, allocated, reserved in turns}
    results.keep("hand-over on 24 GB", last, size)


# The first process does most between two updates without the learner's state, and this is what of
# a card it has then: workspaces of cuBLAS, of forward passes and of autograd.
WORKSPACES = 2 * 32 * 2**20
LEFT_IN_PAGES = 6 * 20 * 2**20  # of segments in which a workspace lies


@pytest.mark.parametrize("size", STEPS)
def test_a_learner_that_leaves_the_card_has_nothing_on_it_while_the_engine_samples(
    stub: Stub, results: Results, size: str, tmp_path: Path
) -> None:
    memory = run(stub, tmp_path, size, "sampling")
    assert memory["error"] is None
    turns = [turn for turn in memory["turns"] if turn[0] == "learner"]
    # of the start: loaded, before the engine is built; then the publish
    assert turns[0][1] < 2**20
    steps = [turns[2 + 3 + 4 * step : 2 + 3 + 4 * (step + 1)] for step in range(STEPS[size])]
    for trained, sending, sent, probed in steps:
        updating = trained[1] - WORKSPACES
        # 8 of 14 bytes a weight leave before the publish, the others after the last was sent
        assert sending[1] - WORKSPACES == pytest.approx(updating * 6 / 14, rel=0.02)
        for _, allocated, reserved in (sent, probed):
            assert allocated == pytest.approx(WORKSPACES, abs=2**20)
            assert reserved <= WORKSPACES + LEFT_IN_PAGES
    last = {"update": steps[-1][0][1:], "publish": steps[-1][1][1:], "sample": steps[-1][3][1:]}
    results.keep("learner off a card of 24 GB", last, size)


def test_without_giving_back_they_run_out_of_memory(stub: Stub, tmp_path: Path) -> None:
    memory = run(stub, tmp_path, "small", "keep")
    assert "out of memory" in memory["error"]
    learner = [reserved for owner, _, reserved in memory["turns"] if owner == "learner"]
    assert len(learner) < 1 + 3 * (1 + STEPS["small"])
