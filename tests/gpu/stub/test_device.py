"""The stub's device is CUDA's where the other tests rely on it: graphs, memory, waits."""

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from helpers.gpu_stub import Stub

pytestmark = pytest.mark.gpu_stub
SCRIPT = str(Path(__file__).parent / "device.py")
GB = 1 << 30
SEGMENTS = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
ALLOWED = {
    "copy from pinned memory",
    "copy to pinned memory",
    "allocation",
    "fork",
    "nothing refused before",
}
# Which message torch gives: its own, that of the call, or that of the invalid capture at its end.
REFUSALS = (
    "operation not permitted when stream is capturing",
    "operation failed due to a previous error during capture",
    "Cannot copy between CPU and CUDA tensors during CUDA graph capture",
    "capturing stream has unjoined work",
    "dependency created on uncaptured work in another stream",
)


@pytest.fixture(scope="module")
def of_capture(stub: Stub) -> dict[str, Any]:
    return stub.ask(SCRIPT, "capture")


def test_work_in_a_capture_is_not_a_launch(of_capture: dict[str, Any]) -> None:
    counted = of_capture["capture"]
    assert (counted["launches"], counted["captured"], counted["captures"]) == (0, 3, 1)


def test_a_replay_is_one_launch_of_its_graph(of_capture: dict[str, Any]) -> None:
    counted = of_capture["replays"]
    assert (counted["launches"], counted["waits"]) == (0, 0)
    assert (counted["graph_launches"], counted["replayed"]) == (3, 9)


def test_a_capture_refuses_what_cuda_refuses(of_capture: dict[str, Any]) -> None:
    errors = of_capture["errors"]
    assert {case for case, error in errors.items() if error is None} == ALLOWED
    for case in errors.keys() - ALLOWED:
        assert any(text in errors[case] for text in REFUSALS), (case, errors[case])


@pytest.mark.parametrize("segments", [{}, SEGMENTS], ids=["blocks", "expandable segments"])
def test_the_allocator_gives_back_and_runs_out(stub: Stub, segments: dict[str, str]) -> None:
    memory = stub.ask(SCRIPT, "memory", STUB_MEM="10", **segments)
    allocated, reserved, held = memory["kept"]
    assert allocated == 4 * GB
    assert reserved == held <= allocated * 1.07
    assert memory["free"] == 10 * GB - held
    assert memory["full"] >= 9 * GB
    assert memory["held"] == 0


def test_processes_share_a_card(stub: Stub, tmp_path: Path) -> None:
    card = {"STUB_CARD": str(tmp_path / "card"), "STUB_MEM": "15"}
    command = [stub.python, SCRIPT, "hold", str(5 * GB)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, env=os.environ | stub.environment | card, **pipes) as other:
        assert other.stdout
        assert other.stdout.readline() == "held\n"
        beside = stub.ask(SCRIPT, "memory", **card)
        other.kill()
    alone = stub.ask(SCRIPT, "memory", **card)
    assert alone["free"] - beside["free"] == 5 * GB
    assert alone["full"] - beside["full"] == 5 * GB


def test_waits_name_the_line_that_waits(stub: Stub) -> None:
    waits = stub.ask(SCRIPT, "waits")
    lines = Path(SCRIPT).read_text("utf-8").splitlines()
    asked = {lines[int(place.rsplit(":", 1)[1]) - 1].split("(")[0].strip() for place in waits}
    assert sum(waits.values()) == 2
    assert asked == {"return numbers * numbers.sum", "return gradient * gradient.sum"}
