"""How often an update waits for the device, and how many kernels its head and its norm take."""

from pathlib import Path
from typing import Any

import pytest

from helpers.gpu_stub import Stub
from helpers.stub_results import Results

pytestmark = pytest.mark.gpu_stub
SCRIPT = str(Path(__file__).parent / "update.py")


@pytest.fixture(scope="module")
def asked(stub: Stub) -> dict[str, Any]:
    return stub.ask(SCRIPT)


@pytest.mark.parametrize("micro_batches", ["1", "8"])
def test_an_update_waits_for_its_norm_its_metrics_and_its_outputs(
    asked: dict[str, Any], results: Results, micro_batches: str
) -> None:
    of_update = asked["updates"][micro_batches]
    results.keep("updates", of_update, micro_batches)
    assert of_update["waits"] == 3, of_update["from"]
    of_norm = [line for line in of_update["from"] if "optimizer.py" in line]
    assert sum(of_update["from"][line] for line in of_norm) == 1


@pytest.mark.parametrize("micro_batches", ["1", "8"])
def test_layouts_are_copied_from_pinned_memory(asked: dict[str, Any], micro_batches: str) -> None:
    of_update = asked["updates"][micro_batches]
    assert of_update["to_device"] >= 6 * int(micro_batches)
    assert of_update["pageable"] == 0


def test_chunks_of_1024_rows_save_a_third_of_the_launches(
    asked: dict[str, Any], results: Results
) -> None:
    large, small = asked["head"]["as it is"], asked["head"]["110 rows"]
    results.keep("head", asked["head"])
    assert large["launches"] < 2 / 3 * small["launches"]


@pytest.mark.parametrize("kind", ["whole", "divided"])
def test_a_norm_over_300_weights_is_one_wait_and_few_kernels(
    asked: dict[str, Any], results: Results, kind: str
) -> None:
    of_norm = asked["clipping"][kind]
    results.keep("clipping", of_norm, kind)
    assert of_norm["waits"] == 1, of_norm["from"]
    assert of_norm["launches"] < 50


def test_a_step_with_moments_in_8_bits_waits_for_its_norm_alone(
    asked: dict[str, Any], results: Results
) -> None:
    of_step = asked["eight bits"]
    results.keep("moments in 8 bits", of_step)
    assert of_step["waits"] == 1, of_step["from"]
    assert of_step["pageable"] == 0
    assert of_step["launches"] < 50 * 100
    assert of_step["made by it"] < 2**16  # tables: the moments were there before
