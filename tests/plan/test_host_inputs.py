"""What a plan says of layers that are computed again from inputs in the host's memory: Qwen3-8B,
which has 36 layers of 4 096 numbers, by hand.
"""

from typing import Any

import pytest

from postgrad.models.known_shapes import shape_of_model
from postgrad.models.settings import ModelSettings
from postgrad.plan.activations import Blocks, backward_of_layer, kept
from postgrad.plan.advice import faster
from postgrad.plan.hardware import parse_hardware
from postgrad.plan.host_inputs import pinned_bytes
from postgrad.plan.lengths import RowLengths
from postgrad.plan.page import Page
from postgrad.plan.plan import Facts, RunPlan, make_plan
from postgrad.plan.smaller import smaller
from postgrad.recipe.load import parse_recipe

LAYERS, INPUT, TOKENS = 36, 4096 * 2, 10_000
SHAPE = shape_of_model(ModelSettings(path="Qwen/Qwen3-8B"))


def planned(way: Any, hardware: str = "H100", **changes: Any) -> RunPlan:
    table = {
        "job": "sft",
        "run_dir": "run",
        "steps": 1,
        "model": {
            "path": "Qwen/Qwen3-8B",
            "gradient_checkpointing": way,
            "lora": {"rank": 64, "alpha": 64},
        },
        "data": {"path": "rows.jsonl", "max_len": TOKENS},
        "batch": {"train_batch_size": 8, "micro_train_tokens": TOKENS},
        **changes,
    }
    lengths = RowLengths(TOKENS / 2, TOKENS / 2, 1.0, "here")
    return make_plan(parse_recipe(table), Facts(shape_of_model, parse_hardware(hardware), lengths))


@pytest.mark.parametrize("compiled", [False, True])
def test_a_gpu_has_the_inputs_of_two_layers_whatever_the_number_of_layers(compiled: bool) -> None:
    how: Any = {"cpu": False, "compiled": compiled}

    def counted(way: Any) -> tuple[int, int]:
        sizes = (SHAPE, 2, None, Blocks())
        return kept(*sizes, checkpointing=way, **how), backward_of_layer(
            *sizes, checkpointing=way, **how
        )

    (there, layer), (elsewhere, with_next) = counted(True), counted("offload")
    assert there - elsewhere == (LAYERS - 1) * INPUT
    assert with_next - layer == INPUT


def test_the_peak_of_an_update_falls_by_the_other_inputs_and_the_holes_beside_them() -> None:
    there, elsewhere = (planned(way).memory.at("update") for way in (True, "offload"))
    assert there - elsewhere == pytest.approx((LAYERS - 2) * INPUT * TOKENS, rel=0.05)


def test_the_host_pins_pieces_of_powers_of_two() -> None:
    plan = planned("offload")
    assert INPUT * TOKENS == 81_920_000
    assert pinned_bytes(plan.roles, plan.sizes) == LAYERS * 2**27
    assert pinned_bytes(planned(True).roles, plan.sizes) == 0
    ranks = {"learner": {"ranks": 2, "tensor_parallel": 2}, "cluster": {"type": "ray"}}
    halves = planned("offload", "2xH100", **ranks)  # each rank has half of the rows
    assert pinned_bytes(halves.roles, halves.sizes) == LAYERS * 2**26
    notes = " ".join(Page(plan, ()).notes())
    assert "inputs of layers take 4.83 GB of the host's memory on each rank" in notes


def test_copies_are_waited_for_only_where_they_take_longer_than_the_layers() -> None:
    there, elsewhere = (planned(way).timing.step["update"] for way in (True, "offload"))
    assert elsewhere == there
    facts = Facts(shape_of_model, parse_hardware("H100"), planned(True).lengths)
    slow = facts.hardware.device.model_copy(update={"host_bytes_per_second": 1e9})
    hardware = facts.hardware.model_copy(update={"device": slow})
    waiting = [
        make_plan(planned(way).recipe, Facts(shape_of_model, hardware, facts.lengths)).timing
        for way in (True, "offload")
    ]
    waited = waiting[1].step["update"] - waiting[0].step["update"]
    copied = 2 * 8 * TOKENS * LAYERS * INPUT / 1e9  # there and back, at most at this speed
    assert 0.5 * copied < waited < 2 * copied


def test_a_cpu_saves_and_waits_for_nothing_and_is_told_so() -> None:
    there, elsewhere = planned(True, "CPU"), planned("offload", "CPU")
    assert elsewhere.memory.peak_bytes == there.memory.peak_bytes
    assert elsewhere.timing.step == there.timing.step
    assert any("saves nothing on a CPU" in note for note in Page(elsewhere, ()).notes())


def test_less_memory_is_advised_by_it_where_layers_are_computed_again_already() -> None:
    way = ("--model.gradient_checkpointing", "offload")
    assert way in [change for change, _ in smaller(planned(True))]
    for plan in (planned(False), planned("offload"), planned(True, "CPU")):
        assert way not in [change for change, _ in smaller(plan)]


def test_more_speed_is_advised_without_it() -> None:
    ways = [change for change, _ in faster(planned("offload")) if "gradient" in change[0]]
    assert [value for _, value in ways] == ["false", "true"]
