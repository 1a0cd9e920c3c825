"""`--profile` says where the time of a step goes, and changes no bit of the run."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from helpers.runs import assert_same_run
from helpers.tiny_runs import MakeRecipe
from postgrad.core.errors import UsageError
from postgrad.observe.console import Console
from postgrad.training.profile import ClockReading, Event, operation_rows, summary, time_rows
from postgrad.training.start import train


def read(run_dir: str) -> dict[str, Any]:
    return json.loads((Path(run_dir) / "profile.json").read_text("utf-8"))


def event(name: str, start: float, end: float, self_seconds: float, *within: str) -> Event:
    return Event(name, start, end, self_seconds, 0.0, within)


EVENTS = [
    event("sample", 0, 100, 20),
    event("aten::mm", 10, 90, 80, "sample"),
    event("train", 100, 300, 10),
    event("train/update", 100, 290, 30, "train"),
    event("aten::mm", 110, 150, 40, "train/update", "train"),
    event("autograd::engine::evaluate_function: Mm", 150, 250, 5, "train/update", "train"),
    event("aten::mm", 150, 245, 95, "autograd::engine::evaluate_function: Mm", "train/update"),
    event("Optimizer.step#AdamW.step", 250, 270, 15, "train/update", "train"),
    event("aten::add", 250, 255, 5, "Optimizer.step#AdamW.step", "train/update"),
]


def test_every_moment_of_a_phase_is_of_one_kind() -> None:
    summarised = summary(EVENTS, {"sample", "train", "train/update", "log"})
    assert list(summarised) == ["sample", "train"]
    assert summarised["sample"]["shares"] == pytest.approx(
        {
            "operations": 0.8,
            "backward": 0.0,
            "optimizer": 0.0,
            "outside": 0.2,
        }
    )
    assert summarised["train"]["shares"] == pytest.approx(
        {
            "operations": 0.2,
            "backward": 0.5,
            "optimizer": 0.1,
            "outside": 0.2,
        }
    )
    assert summarised["train"]["seconds"] == pytest.approx(2e-4)


def test_a_phase_that_a_step_comes_to_twice_is_counted_whole() -> None:
    again = [event("sample", 300, 310, 4), event("aten::add", 304, 310, 6, "sample")]
    sample = summary([*EVENTS, *again], {"sample", "train", "train/update"})["sample"]
    assert sample["seconds"] == pytest.approx(110e-6)
    assert sample["shares"]["operations"] == pytest.approx(86 / 110)
    assert [operation["name"] for operation in sample["operations"]] == ["aten::mm", "aten::add"]


def test_the_longest_operations_are_named_first_with_their_calls() -> None:
    first = summary(EVENTS, {"sample", "train", "train/update"})["train"]["operations"][0]
    assert (first["name"], first["calls"]) == ("aten::mm", 2)
    assert first["share"] == pytest.approx(135 / 200)


def test_operations_are_ordered_by_the_accelerators_time_where_it_has_any() -> None:
    events = [
        event("train", 0, 10, 1),
        event("aten::copy_", 1, 9, 8, "train"),
        Event("aten::mm", 9, 10, 1, 50.0, ("train",)),
    ]
    first = summary(events, {"train"})["train"]["operations"][0]
    assert (first["name"], first["device_seconds"]) == ("aten::mm", 5e-5)


def test_a_table_shows_operations_of_at_least_one_percent() -> None:
    rows = operation_rows(summary(EVENTS, {"sample", "train", "train/update"}))
    assert ("    mm", "67.5%", "2") in rows
    assert ("  Python and waiting", "20.0%", "") in rows
    assert all(len(row) == 3 for row in rows)


def test_parts_stand_below_their_phase_and_the_rest_is_other() -> None:
    before = ClockReading(0.0, 0.0, {"load": 9.0}, {"load": 9.0})
    seconds = {"load": 9.0, "sample/score": 1.0, "train": 5.0, "sample": 3.0, "sample/decode": 1.5}
    timed = before.until(
        ClockReading(10.0, 8.0, seconds, {"load": 9.0, "train": 4.0, "sample": 2.5})
    )
    assert list(timed["phases"]) == ["train", "sample", "sample/score", "sample/decode", "other"]
    assert timed["phases"]["other"] == {"seconds": 2.0, "cpu_seconds": 1.5}
    assert time_rows(timed)[2] == ("  score", "1.000", "10.0%", "")


@pytest.mark.slow
@pytest.mark.parametrize(("job", "phases"), [("sft", {"train"}), ("rl", {"sample", "train"})])
def test_a_profile_changes_no_bit_and_accounts_for_the_whole_step(
    job: str, phases: set[str], make_recipe: MakeRecipe, trained: MakeRecipe, console: Console
) -> None:
    plain, profiled = trained(job), make_recipe(job, "profiled")
    train(profiled, console, profile=True)
    assert_same_run(plain, profiled, 3)
    profile = read(profiled.run_dir)
    timed = profile["timed"]
    main_phases = {name: phase for name, phase in timed["phases"].items() if "/" not in name}
    assert main_phases.keys() >= phases | {"other"}
    assert sum(phase["seconds"] for phase in main_phases.values()) == pytest.approx(
        timed["seconds"]
    )
    for name in phases:
        recorded = profile["recorded"]["phases"][name]
        assert sum(recorded["shares"].values()) == pytest.approx(1.0, abs=0.02)
        assert recorded["operations"]
    assert (timed["step"], profile["recorded"]["step"], profile["threads"]) == (2, 3, 1)
    trace = json.loads(gzip.decompress((Path(profiled.run_dir) / "trace.json.gz").read_bytes()))
    assert {"train", "aten::embedding"} <= {
        trace_event.get("name") for trace_event in trace["traceEvents"]
    }


@pytest.mark.slow
def test_a_step_is_timed_with_its_save_and_its_evaluation(
    make_recipe: MakeRecipe, console: Console
) -> None:
    recipe = make_recipe("rl", eval={"every": 1}, checkpoint={"save_steps": 1})
    train(recipe, console, profile=True)
    assert {"evaluate", "save", "publish"} <= read(recipe.run_dir)["timed"]["phases"].keys()


def test_a_run_too_short_for_a_profile_is_refused(
    make_recipe: MakeRecipe, console: Console
) -> None:
    with pytest.raises(UsageError, match=r"--profile needs 3 steps, .* has 2 left"):
        train(make_recipe("sft", steps=2), console, profile=True)


def test_parts_of_a_phase_are_logged_and_lie_within_it(trained: MakeRecipe) -> None:
    recipe = trained("rl")
    for line in (Path(recipe.run_dir) / "metrics.jsonl").read_text("utf-8").splitlines():
        metric_line = json.loads(line)
        for phase, parts in {
            "sample": ("prefill", "decode", "score"),
            "train": ("columns", "credit", "update"),
        }.items():
            spent = [metric_line[f"{phase}/{part}_seconds"] for part in parts]
            assert min(spent) >= 0.0
            assert 0.0 < sum(spent) <= metric_line[f"{phase}_seconds"]
