"""Two models on the same rows: pairs, tests and what a person sees of it."""

import math
from io import StringIO
from pathlib import Path
from typing import Any

import pytest

from postgrad.core.errors import UsageError
from postgrad.evaluation.results import EvaluatedProblem, Result, compare, rates
from postgrad.models.fresh import make_fresh
from postgrad.observe.console import Console
from postgrad.ops.intervals import difference_interval
from postgrad.tools.evaluate import evaluate


def result(
    rights: list[int], n: int = 1, greedy: list[int] | None = None, rows: list[int] | None = None
) -> Result:
    """A set whose problem i has rights[i] of n samples right."""
    problems = [
        EvaluatedProblem(
            "d", row, f"q{row}", (n, right), (1, greedy[i]) if greedy else None, f"a{right}"
        )
        for i, (row, right) in enumerate(zip(rows or range(len(rights)), rights, strict=True))
    ]
    rated = rates(problems, (1,))
    metrics = {metric: mean for metric, (mean, _) in rated.items()}
    intervals = {metric: ends for metric, (_, ends) in rated.items()}
    return Result(None, len(rights), 0, metrics, 0.0, intervals, problems)


def test_single_answers_are_compared_by_mcnemars_exact_test() -> None:
    """Of 20 rows the model alone has 9 right, the other alone 1: p = 2 (1 + 10) / 2^10."""
    comparison = compare(result([1] * 15 + [0] * 5), result([0] * 9 + [1] * 7 + [0] * 4), 0)
    difference = comparison.differences["accuracy"]
    assert difference.test == "mcnemar"
    assert difference.value == pytest.approx(8 / 20)
    assert difference.p_value == pytest.approx(22 / 1024)
    assert difference.interval == difference_interval([1.0] * 9 + [-1.0] + [0.0] * 10)


def test_sampled_answers_are_compared_by_flipping_signs() -> None:
    """Differences 1/2, 1/2, -1/4, 0: of eight choices of signs, four give a sum of 3/4 or more,
    either way.
    """
    comparison = compare(result([3, 2, 1, 4], 4), result([1, 0, 2, 4], 4), 0)
    difference = comparison.differences["accuracy"]
    assert difference.test == "sign_flip"
    assert difference.value == pytest.approx(0.75 / 4)
    assert difference.p_value == pytest.approx(4 / 8)


def test_rows_are_paired_by_their_place_in_the_dataset() -> None:
    """Row 1 is too long for the second model's tokenizer, row 7 for the first's."""
    ours = result([1, 0, 1, 0], rows=[0, 1, 2, 5])
    theirs = result([1, 0, 1, 1], rows=[0, 2, 5, 7])
    comparison = compare(ours, theirs, 0)
    assert (len(comparison.pairs), comparison.unpaired) == (3, 2)
    assert comparison.differences["accuracy"].value == pytest.approx((0 + 1 - 1) / 3)
    assert [ours.row for ours, _ in comparison.differing()] == [2, 5]


def test_rows_differ_by_the_greedy_answer_where_there_is_one() -> None:
    ours = result([4, 0, 2], 4, greedy=[1, 0, 0])
    theirs = result([0, 0, 2], 4, greedy=[1, 0, 1])
    comparison = compare(ours, theirs, 0)
    assert [pair[0].row for pair in comparison.differing()] == [2]
    assert comparison.to_json()["differing"] == [
        {"dataset": "d", "row": 2, "metric": "greedy_accuracy", "model": 0.0, "against": 1.0}
    ]


def test_the_rows_that_are_furthest_apart_come_first() -> None:
    comparison = compare(result([4, 1, 2], 4), result([3, 1, 0], 4), 0)
    assert [pair[0].row for pair in comparison.differing()] == [2, 0]


def test_a_problem_that_one_model_has_no_score_for_is_in_no_difference() -> None:
    ours, theirs = result([1, 1]), result([0, 0])
    unscored = [EvaluatedProblem("d", 0, "q0", (0, 0), None, ""), theirs.problems[1]]
    comparison = compare(ours, Result(None, 2, 1, {}, 0.0, {}, unscored), 0)
    assert comparison.differences["accuracy"].rows == 1
    assert [pair[0].row for pair in comparison.differing()] == [1]


def test_without_a_pair_nothing_is_claimed() -> None:
    difference = compare(result([1], rows=[0]), result([1], rows=[1]), 0).differences["accuracy"]
    assert math.isnan(difference.value)
    assert difference.p_value == 1.0


@pytest.mark.slow
def test_two_models_are_evaluated_side_by_side(
    make_recipe: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    recipe = make_recipe("rl", eval={"correct_at": 0.1, "n_samples": 4, "greedy": False})
    paths = [str(tmp_path / name) for name in "ab"]
    for seed, path in enumerate(paths):
        make_fresh(recipe.model.init, [], seed, Path(path))
    stream = StringIO()
    report = evaluate(recipe, paths[0], Console("plain", stream), paths[1])
    ours, theirs = report["sets"][0], report["against"]["sets"][0]
    compared = report["comparison"][0]
    assert (compared["rows"], compared["unpaired"]) == (8, 0)
    for metric, difference in compared["metrics"].items():
        assert difference["difference"] == pytest.approx(ours[metric] - theirs[metric])
        assert difference["low"] <= difference["difference"] <= difference["high"]
        assert 0.0 < difference["p_value"] <= 1.0
    assert set(compared["metrics"]) == {"accuracy", "pass@2"}
    assert compared["differing"]  # or there is nothing to see here
    text = stream.getvalue()
    difference = compared["metrics"]["accuracy"]
    assert f"model    {paths[0]}\nagainst  {paths[1]}\n" in text
    for path in paths:  # another tokenizer may lose other rows
        assert f"rows of the evaluation data, read by {path}" in " ".join(text.split())
    value = difference["difference"]
    farther = max(difference["high"] - value, value - difference["low"])
    assert f"{value:+.3f} ± {farther:.3f}" in text
    assert f"{len(compared['differing'])} of 8 rows differ in accuracy" in text
    assert report["accuracy_low"] < report["accuracy"] < report["accuracy_high"]


@pytest.mark.slow
def test_a_model_against_itself_is_no_different(make_recipe: Any, tmp_path: Path) -> None:
    recipe = make_recipe("rl")
    make_fresh(recipe.model.init, [], 0, tmp_path / "a")
    path = str(tmp_path / "a")
    report = evaluate(recipe, path, Console("quiet"), path)
    compared = report["comparison"][0]
    assert compared["differing"] == []
    assert all(difference["p_value"] == 1.0 for difference in compared["metrics"].values())


def test_a_reward_model_of_a_pipelines_stage_is_asked_for_by_its_key(make_recipe: Any) -> None:
    judge = {"rewards": [{"type": "reward_model"}], "reward_model": {"model": {"path": "@reward"}}}
    recipe = make_recipe("rl", **judge)
    with pytest.raises(UsageError, match=r"reward_model\.model\.path = '@reward' .* or give --rew"):
        evaluate(recipe, "anything", Console("quiet"))
