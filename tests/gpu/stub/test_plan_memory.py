"""The plan's memory of a GPU is what torch's own allocator reserves, for a few of the cases of
benchmarks.plan_memory_gpu; all of them are in its results.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from helpers.gpu_stub import ROOT, Stub

pytestmark = pytest.mark.gpu_stub
CASES = (
    "sft 0.6B checkpointing 8192",
    "sft 0.6B offload 8192",
    "sft 8B zero3 checkpointing 8192",
    "sft 8B compiled zero3 checkpointing 8192",
    "grpo 0.6B 8192",
    "grpo 0.6B resting 8192",
)


@pytest.fixture(scope="module")
def rows(stub: Stub, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, object]]:
    """By case: the plan beside what was reserved."""
    to = tmp_path_factory.mktemp("plan") / "rows.json"
    command = ["-m", "benchmarks.plan_memory_gpu", "--names", *CASES, "--to", str(to)]
    done = stub.run(*command, STUB_MEM="139")
    assert done.returncode == 0, done.stderr[-4000:]
    return {row["name"]: row for row in json.loads(to.read_text("utf-8"))["rows"]}


@pytest.mark.parametrize("case", CASES)
def test_a_plan_is_within_a_twentieth_of_what_is_reserved(
    rows: dict[str, dict[str, object]], case: str
) -> None:
    row = rows[case]
    assert row["within"], row


def test_so_is_the_sampling_phase_of_a_learner_that_leaves_the_card(
    rows: dict[str, Any],
) -> None:
    """Its engine reads the weights that compute; 12 of 14 bytes a weight leave."""
    stays, leaves = rows["grpo 0.6B 8192"], rows["grpo 0.6B resting 8192"]
    for row in (stays, leaves):
        allocated, reserved = row["run"]["phases"]["sample"]
        assert row["plan"]["phases"]["rollout"] == pytest.approx(reserved, rel=0.05)
        assert reserved <= 1.05 * allocated
    less = [row["run"]["phases"]["sample"][0] for row in (stays, leaves)]
    assert less[0] - less[1] == pytest.approx(12 * 596_049_920, rel=0.02)


def test_all_cases_of_the_committed_results_are_within_it() -> None:
    path = Path(ROOT) / "benchmarks" / "results" / "plan_memory_gpu.json"
    committed = json.loads(path.read_text("utf-8"))["rows"]
    assert committed
    assert [row["name"] for row in committed if not row["within"]] == []
