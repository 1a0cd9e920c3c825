"""The built-in engine on CUDA: what a decode step asks of the device, and its attention kernels."""

import json
from pathlib import Path
from typing import Any

import pytest

from helpers.gpu_stub import Stub
from helpers.stub_results import Results

pytestmark = pytest.mark.gpu_stub
HERE = Path(__file__).parent
SCRIPT = str(HERE / "decode.py")
NEW_ROWS = 3  # numbers of rows, each a graph, that the steps of the script pass through


@pytest.fixture(scope="module")
def report(stub: Stub) -> dict[str, Any]:
    return stub.ask(SCRIPT, "steps")


def summed(step: dict[str, int]) -> dict[str, int]:
    names = ("launches", "graph_launches", "waits", "to_device", "from_device", "pageable")
    return {name: step[name] for name in names}


def test_prompts_are_computed_and_copied_without_a_wait(
    report: dict[str, Any], results: Results
) -> None:
    first = report["steps"][0]
    results.keep("first step of 256 rows, Qwen3-0.6B", first)
    assert first["waits"] == first["pageable"] == 0
    assert first["launches"] <= 1_900  # 32 prompts, and one token as later graphs compute it


def test_a_step_is_one_graph_and_one_wait(report: dict[str, Any], results: Results) -> None:
    steps, ended = report["steps"], report["ended"]
    quiet = steps[2:40]
    assert ended[:40] == [0] * 40
    results.keep("decode step of 256 rows, Qwen3-0.6B", quiet[-1])
    assert {json.dumps(summed(step)) for step in quiet} == {
        json.dumps(
            {"launches": 0, "graph_launches": 1, "waits": 1, "to_device": 0, "from_device": 1}
            | {"pageable": 0}
        )
    }
    assert quiet[-1]["replayed"] < 1000  # the kernels of 28 layers, the head and the sampler


def test_rows_that_end_cost_an_upload_and_no_copy_in_the_cache(report: dict[str, Any]) -> None:
    steps, ended = (
        report["steps"][41:],
        report["ended"][40:-1],
    )  # what ended is uploaded in the next
    assert set(ended) == {8}
    replayed = [step for step in steps if step["graph_launches"] and not step["captures"]]
    assert len(replayed) > 10
    assert max(step["launches"] for step in replayed) <= 40
    assert {step["to_device"] for step in replayed} == {1}
    assert {step["waits"] for step in replayed} == {1}


def test_each_number_of_rows_is_run_once_then_captured_once(report: dict[str, Any]) -> None:
    steps = report["steps"]
    eager = [step for step in steps if not step["graph_launches"]]
    captured = [step for step in steps if step["captures"]]
    assert len(eager) == len(captured) == NEW_ROWS
    assert all(step["launches"] > 500 for step in eager)
    assert all(step["captures"] == 1 and step["launches"] <= 40 for step in captured)
    assert sum(step["refused"] for step in steps) == 0


def test_graphs_outlast_a_publish_and_end_with_the_cache(stub: Stub, results: Results) -> None:
    captured = stub.ask(SCRIPT, "publishes")
    results.keep("graphs captured in a batch", captured)
    assert captured["first"] > 5
    assert captured["after a publish"] == 0
    assert captured["after a rest"] == captured["of weights elsewhere"] == captured["first"]


@pytest.mark.parametrize("kind", ["qwen3", "deepseek_v3", "qwen3_5_text"])
def test_a_second_turn_computes_its_reply_alone(kind: str, stub: Stub, results: Results) -> None:
    """The step ahead has computed the newest token of the first turn."""
    turns_report = stub.ask(SCRIPT, "turns", kind)
    results.keep(
        f"{kind}: the step that begins 32 second turns of 30 new tokens", turns_report["begun"]
    )
    assert turns_report["computed"] == [100 + 101 + 102 + 103, 32 * 30]
    assert turns_report["ended"] == 32
    assert turns_report["begun"]["refused"] == 0


def test_filters_are_in_the_graph_too(stub: Stub) -> None:
    filters_report = stub.ask(SCRIPT, "filters")
    quiet = filters_report["steps"][2:40]
    assert {(step["launches"], step["graph_launches"], step["waits"]) for step in quiet} == {
        (0, 1, 1)
    }


@pytest.mark.parametrize("capability", ["8.0", "8.9", "9.0"])
def test_attention_is_compiled_for_every_size_of_head(stub: Stub, capability: str) -> None:
    asked = stub.ask(SCRIPT, "kernels", STUB_CAP=capability)
    assert len(asked) == 28
    # one store, prompts, responses, their merge; and two new buffers, which are zeroed
    assert set(asked.values()) == {6}


@pytest.fixture(scope="module")
def interpreted(stub: Stub) -> dict[str, Any]:
    return stub.ask(str(HERE / "interpreted.py"))


def test_attention_is_that_of_float64(interpreted: dict[str, Any]) -> None:
    assert len(interpreted["attended"]) == 14
    for name, case in interpreted["attended"].items():
        assert case["error"] < (2e-3 if name == "float16" else 2e-6), name
        assert case["finite"], name
        assert case["as expected"], name


def test_prompts_are_copied_to_their_places_and_nowhere_else(interpreted: dict[str, Any]) -> None:
    assert interpreted["filled"] == [True] * 4
