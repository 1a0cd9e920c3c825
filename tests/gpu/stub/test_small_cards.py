"""Recipes for cards of 24 GB, at their real shapes: what they take beside what was planned."""

from pathlib import Path
from typing import Any

import pytest

from helpers.gpu_stub import ROOT, SMALL_CARDS, Stub

pytestmark = pytest.mark.gpu_stub
COMMAND = str(Path(__file__).parent / "small_cards.py")
CARD = 25_383_256_719  # bytes of an RTX 4090
CONTEXT = 1_000_000_000  # of which the driver and the kernels take so many


@pytest.mark.parametrize("recipe", SMALL_CARDS)
def test_two_steps_take_what_is_planned_on_a_card_of_24_gb(
    stub: Stub, results: dict[str, Any], recipe: str, tmp_path: Path
) -> None:
    name = recipe.split("/")[1]
    path = f"{ROOT / 'src'}:{ROOT / 'tests'}:{ROOT}"
    told = stub.ask(
        COMMAND, name, str(tmp_path), "RTX-4090", STUB_CAP="8.9", STUB_MEM="24", PYTHONPATH=path
    )
    plan, run = told["plan"], told["run"]
    results.setdefault("small cards", {})[name] = {
        "planned": plan["bytes"], "allocated": run["allocated"], "reserved": run["reserved"],
        "phases": run["phases"],
    }  # fmt: skip
    assert run["reserved"] + CONTEXT < CARD
    assert plan["bytes"] == pytest.approx(run["reserved"], rel=0.05)
