"""Compiled layers and flex attention on every kind of card, and what a micro-batch asks of it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from helpers.gpu_stub import Stub
from helpers.stub_results import Results

pytestmark = pytest.mark.gpu_stub
SCRIPT = str(Path(__file__).parent / "layers.py")
CAPABILITIES = ("8.0", "8.6", "8.9", "9.0")


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("kind", ["types", "heads"])
def test_kernels_are_made_for_a_card(
    stub: Stub, results: Results, kind: str, capability: str
) -> None:
    """In float32 too; Triton refuses kernels that need more shared memory than the card has."""
    reports = stub.ask(SCRIPT, kind, STUB_CAP=capability, STUB_MEM="24")
    results.keep("compiled", reports, f"{kind}, {capability}")
    assert {case: of_one["error"] for case, of_one in reports.items()} == dict.fromkeys(reports)
    assert all(of_one["graphs"] > 0 for of_one in reports.values())


def test_a_micro_batch_of_compiled_layers_takes_few_launches(stub: Stub, results: Results) -> None:
    reports = stub.ask(SCRIPT, "micro-batches")
    results.keep("micro-batches", reports)
    assert reports["compiled"]["launches"] <= 2000
    assert reports["compiled"]["launches"] < reports["plain"]["launches"] / 3
    assert reports["graphs"] <= 2
    masks = reports["masks"]
    assert masks["waits"] == masks["pageable"] == 0
    assert masks["launches"] + masks["to_device"] + masks["on_device"] <= 12


def test_layers_that_ranks_share_are_one_graph_of_few_launches(
    stub: Stub, results: Results
) -> None:
    reports = stub.ask(SCRIPT, "shared")
    results.keep("shared layers", reports)
    for name in ("rows", "matrices"):
        plain, compiled = reports[f"{name}, plain"], reports[f"{name}, compiled"]
        assert compiled["graphs"] == 1
        assert compiled["launches"] < plain["launches"] / 2
        assert compiled["waits"] == compiled["pageable"] == 0


def test_a_compiled_layer_keeps_what_a_plan_counts(stub: Stub, results: Results) -> None:
    reports = stub.ask(SCRIPT, "kept")
    results.keep("kept by a compiled layer", reports)
    for case, bytes_of in reports.items():
        assert bytes_of["kept"] == pytest.approx(bytes_of["planned"], rel=1e-6), case


@pytest.fixture(scope="module")
def recomputed(stub: Stub, results_of: Callable[[Stub], Results]) -> dict[str, Any]:
    reports = stub.ask(SCRIPT, "recomputed")
    results_of(stub).keep("activations", reports)
    return reports


@pytest.mark.parametrize("how", ["", ", compiled"])
def test_inputs_of_layers_leave_the_device_without_a_wait_or_a_launch(
    recomputed: dict[str, Any], how: str
) -> None:
    """Of 28 layers 28 inputs leave; the last is still there when the backward pass begins."""
    there, elsewhere = (recomputed[way + how] for way in ("computed again", "inputs on the host"))
    assert elsewhere["launches"] == there["launches"]
    assert elsewhere["waits"] == elsewhere["pageable"] == 0
    copies = [elsewhere[way] - there[way] for way in ("from_device", "to_device", "on_device")]
    assert copies == [28, 27, 0]
    size = 8 * 1024 * 1024 * 2  # of an input: tokens, width, bytes
    assert there["kept"] - elsewhere["kept"] == 27 * size
    assert 26 * size <= there["peak"] - elsewhere["peak"] <= 27 * size


@pytest.mark.parametrize("how", ["", ", compiled"])
def test_keeping_products_alone_saves_less_and_launches_plain_layers_again(
    recomputed: dict[str, Any], how: str
) -> None:
    """Why there is no such setting: compiled layers keep two thirds of what they would, at no
    launch; plain ones launch nearly as much as if nothing were kept.
    """
    kept, products, again = (
        recomputed[way + how] for way in ("kept", "products kept", "computed again")
    )
    assert again["kept"] < 0.1 * products["kept"] < 0.1 * kept["kept"]
    repeated = (products["launches"] - kept["launches"]) / (again["launches"] - kept["launches"])
    assert (repeated < 0.2) if how else (repeated > 0.8)


@pytest.fixture(scope="module")
def updates(stub: Stub) -> dict[str, Any]:
    return stub.ask(SCRIPT, "updates")


@pytest.mark.parametrize("kind", ["whole", "checkpointed"])
def test_so_does_one_within_an_update_with_its_head_and_its_sum_of_gradients(
    updates: dict[str, Any], results: Results, kind: str
) -> None:
    results.keep("micro-batches of updates", updates)
    assert updates[kind]["launches"] <= 2000
    assert updates[kind]["waits"] == updates[kind]["pageable"] == 0


@pytest.mark.parametrize("kind", ["whole, LoRA", "checkpointed, LoRA"])
def test_so_does_one_with_adapters(updates: dict[str, Any], kind: str) -> None:
    """A layer takes 32 products, and 42 where activations are computed again."""
    assert updates[kind]["launches"] <= 2000


def test_a_fresh_adapter_is_copied_from_pinned_memory(updates: dict[str, Any]) -> None:
    asked = updates["a fresh adapter"]
    assert asked["to_device"] == 28 * 7  # its A; B is zero, on the device
    assert asked["pageable"] == asked["waits"] == 0


@pytest.mark.parametrize(("kind", "most"), [("whole, LoRA", 1_560), ("checkpointed, LoRA", 2_000)])
def test_adapters_on_layers_of_one_input_share_products(
    updates: dict[str, Any], kind: str, most: int
) -> None:
    assert updates[kind]["launches"] <= most
    assert updates[kind]["waits"] == updates[kind]["pageable"] == 0
