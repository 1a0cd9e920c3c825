"""Forward passes of preference jobs beside their updates: in every step, or once before the first.

`training.pairs` makes them: `PreferenceJob.experience` in every step, `_read_by_reference` once.
"""

from collections.abc import Mapping
from typing import Any

import pytest

from plan.test_timing import INIT
from postgrad.models.known_shapes import shape_of_model
from postgrad.plan.hardware import Hardware, catalogue
from postgrad.plan.page import Page
from postgrad.plan.plan import Facts, RunPlan, make_plan
from postgrad.recipe.load import parse_recipe

BATCH = 32  # samples of an update


def of(algorithm: Mapping[str, Any] | str, rows: int | None = BATCH, **changes: Any) -> RunPlan:
    """A plan of preferences whose data has so many rows; None: nobody knows."""
    settings = {"type": algorithm} if isinstance(algorithm, str) else dict(algorithm)
    table = {
        "job": "preference", "run_dir": "run", "model": {"init": INIT, "dtype": "float32"},
        "data": {"path": "rows.jsonl", "max_len": 256}, "batch": {"train_batch_size": BATCH},
        "algorithm": settings, **({} if "epochs" in changes else {"steps": 10}), **changes,
    }  # fmt: skip
    one_core = Hardware(count=1, device=catalogue({})["CPU-BF16"])
    return make_plan(parse_recipe(table), Facts(shape_of_model, one_core, rows=rows))


def a_pass(algorithm: str) -> float:
    """Seconds of one forward pass over an update's samples."""
    return of({"type": algorithm}).timing.once["reference"]


@pytest.mark.parametrize(("algorithm", "passes"), [("wpo", 2), ("aot", 1), ("ipo", 0)])
def test_an_update_counts_the_passes_for_the_policys_logprobs_before_it(
    algorithm: str, passes: int
) -> None:
    """WPO reads them at two temperatures, AOT at one."""
    plain = of("dpo").timing.step["update"]
    wanted = plain + passes * a_pass("dpo")
    assert of(algorithm).timing.step["update"] == pytest.approx(wanted)


def test_an_update_of_kto_counts_a_pass_over_prompts_with_other_answers() -> None:
    """Its reference reads these too, of the whole run before the first update: ten updates, beside
    the rows of one.
    """
    without, with_them = of({"type": "kto", "loss": "apo_zero"}), of("kto")
    each = without.timing.once["reference"]
    wanted = without.timing.step["update"] + each
    assert with_them.timing.step["update"] == pytest.approx(wanted)
    assert with_them.timing.once["reference"] == pytest.approx(11 * each)


def test_a_reference_that_follows_the_policy_computes_in_every_update_and_never_once() -> None:
    frozen, moving = of("dpo"), of("dpo", reference={"refresh_steps": 4})
    assert moving.timing.once == {}
    wanted = frozen.timing.step["update"] + a_pass("dpo")
    assert moving.timing.step["update"] == pytest.approx(wanted)
    kto = of("kto", reference={"refresh_steps": 4}).timing.step["update"]
    plain = of({"type": "kto", "loss": "apo_zero"})
    wanted = plain.timing.step["update"] + 3 * plain.timing.once["reference"]
    assert kto == pytest.approx(wanted)


@pytest.mark.parametrize("changes", [{"epochs": 1}, {"epochs": 3}, {"steps": 2}])
def test_a_reference_reads_each_row_once_however_long_the_run_is(changes: dict[str, int]) -> None:
    several = of("dpo", rows=10 * BATCH, **changes)
    assert several.timing.once["reference"] == pytest.approx(10 * a_pass("dpo"))
    assert not [note for note in Page(several, ()).notes() if "reads every row" in note]


def test_a_plan_says_where_nobody_knows_how_many_rows_a_reference_reads() -> None:
    """Without their number it said 0 seconds."""
    unknown, stated = of("dpo", rows=None, epochs=1), of("dpo", rows=None, steps=10)
    assert unknown.timing.once == {}
    assert not [row for row in Page(unknown, ()).time_rows() if "once" in row[0]]
    assert stated.timing.once["reference"] == pytest.approx(10 * a_pass("dpo"))
    for plan, end in ((unknown, "are not counted"), (stated, "are those of all steps' rows")):
        (note,) = (note for note in Page(plan, ()).notes() if "reads every row" in note)
        assert note.startswith("the reference reads every row once")
        assert note.endswith(end)
    without = Page(of("simpo", rows=None), ()).notes()
    assert not [note for note in without if "reads every row" in note]
