"""The command that measures a GPU comes to its end on CUDA."""

import json
from importlib.util import find_spec
from typing import Any

import pytest

from benchmarks.gpu.session import PARTS
from helpers.gpu_stub import Stub, nvidia_smi
from helpers.stub_results import Results

pytestmark = pytest.mark.gpu_stub
# What reads results: the stub's are zeros. A peer's choice of kernels (cuDNN) is its own affair.
READS = {"reward rises in 20 steps", "SFT of the quickstart", "100M spells backward"}
PEERS = ("transformers", "vllm", "trl")
GRAPHS = find_spec("postgrad.rollout.local.step") is not None


@pytest.fixture(scope="module")
def report(stub: Stub, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the session wrote, "status" and "output"."""
    folder = tmp_path_factory.mktemp("command")
    path = nvidia_smi(folder, "NVIDIA H100 80GB HBM3", 81559)
    # The limit of a part is its share of the minutes; compilers take a third of an hour on a
    # loaded machine.
    done = stub.run(
        "-m", "benchmarks.gpu", "--small", "--minutes", "600", "--to", str(folder / "to"),
        PATH=path, TMPDIR=str(folder),
    )  # fmt: skip
    log = folder / "to" / "log.txt"
    output = done.stdout + done.stderr + (log.read_text("utf-8") if log.exists() else "")
    text = (folder / "to" / "results.json").read_text("utf-8")
    return {**json.loads(text), "status": done.returncode, "output": output, "to": folder / "to"}


def cases_of(report: dict[str, Any]) -> dict[str, Any]:
    return {name: case for part in report["parts"].values() for name, case in part["cases"].items()}


def test_every_part_comes_to_its_end(report: dict[str, Any], results: Results) -> None:
    ended = {name: part["ended"] for name, part in report["parts"].items()}
    assert ended == dict.fromkeys(PARTS, "whole"), report["output"][-4000:]
    assert report["status"] == 0
    assert report["about"]["done"]
    outcomes = {
        name: next((word for word in ("failed", "skipped") if word in case), "ran")
        for name, case in cases_of(report).items()
    }
    results.keep("benchmarks.gpu", outcomes)


def test_no_case_fails_but_a_peers(report: dict[str, Any]) -> None:
    failed = {name: case["failed"] for name, case in cases_of(report).items() if "failed" in case}
    assert {name: why for name, why in failed.items() if not name.endswith(PEERS)} == {}


def test_what_reads_results_has_missed_its_goal_and_nothing_is_skipped(
    report: dict[str, Any],
) -> None:
    cases = cases_of(report)
    for name in READS:
        assert cases[name]["passed"] is False
    skipped = {name for name, case in cases.items() if "skipped" in case}
    without = set() if GRAPHS else {name for name in cases if "graphs" in name}
    # pytest is not in these environments, and a card alone has no other for NCCL
    cannot = {"tests/gpu", "weights by nccl"}
    assert {name for name in skipped if not name.endswith(PEERS)} == without | cannot


def test_plans_know_the_card_and_are_held_to_the_runs(report: dict[str, Any]) -> None:
    cases = cases_of(report)
    assert cases["row for the catalogue"]["file"] == "hardware.toml"
    runs = {row["run"] for row in cases["memory"]["rows"]}
    assert {"sft-1.5B-4k", "sft-1.5B-4k-eager", "sft-8B-4k-LoRA-checkpointing", "grpo-2x4"} <= runs
    assert all(row["measured"] > 0 for row in cases["memory"]["rows"])
    assert {measurement["device"] for measurement in cases["calibrate"]["measured"]} == {"H100"}
