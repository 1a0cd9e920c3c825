"""What a run's evaluations and metrics come to in summary.json, by hand."""

from io import StringIO
from pathlib import Path
from typing import Any

import pytest

from postgrad.observe.console import Console
from postgrad.tools import pipeline
from postgrad.training import summary
from postgrad.training.start import resume, train


def evaluation(step: int, name: str | None = None, **values: float) -> dict[str, Any]:
    return {"step": step, "set": name, **values}


def test_what_changed_is_that_of_the_first_set() -> None:
    gold = "reward/gold"
    changes = summary._changes(
        [
            evaluation(0, "a", accuracy=0.25, reward=-0.5, **{gold: 0.5}),
            evaluation(0, "b", accuracy=0.75),
            evaluation(8, "a", accuracy=0.5, reward=1.5, **{gold: 0.875}),
            evaluation(8, "b", accuracy=1.0),
        ]
    )
    assert changes == {
        "accuracy_before": 0.25,
        "accuracy_after": 0.5,
        "reward_before": -0.5,
        "reward_after": 1.5,
        "rewards": {"gold": {"before": 0.5, "after": 0.875}},
    }


def test_without_an_evaluation_at_step_0_nothing_is_known_of_before() -> None:
    changes = summary._changes([evaluation(4, accuracy=0.1), evaluation(8, accuracy=0.5)])
    assert changes == {"accuracy_before": None, "accuracy_after": 0.5}
    assert summary.change(changes, "accuracy") == "0.500"
    assert summary.change(changes, "reward") == ""
    assert summary.change({**changes, "rated": False}, "accuracy") == ""
    assert summary._changes([]) == {}


def test_kl_is_a_mean_over_the_last_ten_steps_and_the_most_of_all() -> None:
    lines = [
        {"kl/token_mean": token, "kl/sequence_mean": 10 * token, "kl/coefficient": 0.1}
        for token in (0.5, *(0.1 * n for n in range(1, 11)))
    ]
    kl = summary._kl([{"loss": 1.0}, *lines], 0.6)["kl"]
    assert kl == {
        "token": pytest.approx(0.55),
        "token_most": 1.0,
        "sequence": pytest.approx(5.5),
        "coefficient": 0.1,
        "target": 0.6,
    }
    assert summary._kl([{"loss": 1.0}], None) == {}


def test_steps_without_a_loss_are_in_no_mean() -> None:
    assert summary._mean([None, 1.0, 3.0]) == 2.0
    assert summary._mean([None]) is None


def test_the_table_has_a_line_for_each_thing_that_a_stage_reached() -> None:
    stages = [
        {
            "job": "sft",
            "evaluations": {},
            "accuracy_before": None,
            "accuracy_after": 0.125,
            "loss": 0.5,
        },
        {
            "job": "preference",
            "evaluations": {"eval/people/accuracy": 0.875, "eval/gold/accuracy": 0.9375},
            "accuracy_before": None,
            "accuracy_after": 0.875,
            "loss": None,
        },
        {
            "job": "rl",
            "evaluations": {"eval/accuracy": 0.75, "eval/accuracy/else": 0.5},
            "reward_before": -0.25,
            "reward_after": 1.0,
            "rewards": {
                "reward_model": {"before": -0.25, "after": 1.0},
                "gold": {"before": 0.5, "after": 0.75},
            },
            "loss": -0.00001,
            "kl": {"token": 0.125, "token_most": 0.25, "sequence": 1.5, "target": 0.2},
        },
    ]
    assert pipeline._reached(stages) == [
        ("accuracy", "0.125", "0.875", ""),
        ("  people", "", "0.875", ""),
        ("  gold", "", "0.938", ""),
        ("reward", "", "", "-0.250 → 1.000"),
        ("  reward_model", "", "", "-0.250 → 1.000"),
        ("  gold", "", "", "0.500 → 0.750"),
        ("loss", "0.5000", "", ""),  # near 0 whatever happens in RL
        ("KL per token", "", "", "0.125 (target 0.2, most 0.250)"),
        ("KL per response", "", "", "1.50"),
    ]


def test_tokens_of_a_step_count_once_however_many_engines_have_sampled_them() -> None:
    step = {"response_tokens": 100.0, "sample_seconds": 8.0, "overlap/sample_seconds": 2.0}
    step |= {"engine/0/response_tokens": 60.0, "engine/0.1/response_tokens": 30.0}
    step |= {"policy/computed_tokens": 30.0, "critic/computed_tokens": 20.0, "train_seconds": 5.0}
    speeds = {"response_tokens_per_second": 10.0, "train_tokens_per_second": 10.0}
    assert summary._speeds([step, step]) == speeds


def test_the_time_of_a_resumed_run_is_that_of_all_its_processes() -> None:
    phases = {"sample": 30.0, "train": 12.25}
    rows = summary._times({"seconds": 44.0, "phase_seconds": phases})
    assert rows == [("time", "44 s"), ("  sample", "30.0 s"), ("  train", "12.2 s")]
    resumed = summary._times({"seconds": 4.0, "phase_seconds": phases})
    assert resumed[0] == ("time", "42 s (4 s since the last resume)")


@pytest.mark.slow
def test_a_run_that_has_ended_says_so_when_it_is_resumed(make_recipe: Any) -> None:
    recipe = make_recipe("rl", steps=1)
    train(recipe, Console("quiet", StringIO()))
    output = StringIO()
    resume(Path(recipe.run_dir), [], [], Console("plain", output))
    assert "all 1 steps are done" in output.getvalue()
