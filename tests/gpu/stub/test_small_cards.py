"""Recipes for cards of 24 GB, at their real shapes: what they take beside what was planned."""

from pathlib import Path

import pytest

from helpers.gpu_stub import SMALL_CARDS, Stub
from helpers.stub_results import Results

pytestmark = pytest.mark.gpu_stub
COMMAND = str(Path(__file__).parent / "small_cards.py")
CARD = 25_383_256_719  # bytes of an RTX 4090
CONTEXT = 1_000_000_000  # of which the driver and the kernels take so many


@pytest.mark.parametrize("recipe", SMALL_CARDS)
def test_two_steps_take_what_is_planned_on_a_card_of_24_gb(
    stub: Stub, results: Results, recipe: str, tmp_path: Path
) -> None:
    name = recipe.split("/")[1]
    report = stub.ask(COMMAND, recipe, str(tmp_path), "RTX-4090", STUB_CAP="8.9", STUB_MEM="24")
    plan, run = report["plan"], report["run"]
    measured = {
        "planned": plan["bytes"], "allocated": run["allocated"], "reserved": run["reserved"],
        "phases": run["phases"],
    }  # fmt: skip
    results.keep("small cards", measured, name)
    assert run["reserved"] + CONTEXT < CARD
    assert plan["bytes"] == pytest.approx(run["reserved"], rel=0.05)
