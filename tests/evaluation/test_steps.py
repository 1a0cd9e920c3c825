"""What an evaluation says of whatever judges steps: worked out by hand."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from helpers.comparing import recipe_of
from postgrad.evaluation.results import compare
from postgrad.evaluation.steps import StepEvaluator, first_wrong
from postgrad.models.tokenizer import load_tokenizer
from postgrad.ops.intervals import harmonic_interval, wilson

RIGHT, WRONG = math.log(3), -math.log(3)  # scores of p = 3/4 and 1/4


def evaluated(
    labels: list[list[Any]], scores: list[list[float]], to: Path, tokenizer: Any, **keys: Any
) -> Any:
    path = to / "eval.jsonl"
    rows = [
        {"prompt": f"{n}?", "completions": ["a"] * len(row), "labels": row, "kind": f"k{n % 2}"}
        for n, row in enumerate(labels)
    ]
    path.write_text("\n".join(map(json.dumps, rows)), "utf-8")
    evaluator = StepEvaluator(recipe_of(str(path), **keys), tokenizer)
    (result,) = evaluator(lambda _: [np.array(row) for row in scores])
    return result


@pytest.fixture
def tokenizer(models: Any) -> Any:
    return load_tokenizer(models(0))


def test_the_first_wrong_step_decides(tmp_path: Path, tokenizer: Any) -> None:
    """Two of three erroneous answers are named at the right step, one of two correct ones is left
    alone: F1 = 2 * (2/3) * (1/2) / (2/3 + 1/2) = 4/7.
    """
    labels = [[1, 0], [1, 1, 0], [0, 1], [1, 1], [1]]
    scores = [
        [RIGHT, WRONG],  # right
        [WRONG, RIGHT, WRONG],  # too early
        [WRONG, WRONG],  # right: what follows does not count
        [RIGHT, RIGHT],  # right
        [WRONG],  # wrong
    ]
    result = evaluated(labels, scores, tmp_path, tokenizer, by="kind")
    metrics = result.metrics
    assert metrics["erroneous"] == pytest.approx(2 / 3)
    assert metrics["correct"] == pytest.approx(1 / 2)
    assert metrics["f1"] == pytest.approx(4 / 7)
    assert metrics["accuracy"] == pytest.approx(3 / 5)
    assert metrics["accuracy/k0"] == pytest.approx(2 / 3)
    assert metrics["step_accuracy"] == pytest.approx(7 / 10)
    agreed, parted = -math.log(3 / 4), -math.log(1 / 4)
    assert metrics["loss"] == pytest.approx((7 * agreed + 3 * parted) / 10)
    names = {"accuracy", "step_accuracy", "loss", "erroneous", "correct", "f1"}
    assert names <= result.intervals.keys()
    for name in names:
        low, high = result.intervals[name]
        assert low <= metrics[name] <= high


def test_models_are_compared_on_each_of_the_answers_of_a_row(
    tmp_path: Path, tokenizer: Any
) -> None:
    """A row of PRM800K with two first steps, of which one goes on. Only the first model names the
    right step of the second answer, and both have one of three steps right.
    """
    candidates = [{"text": "a", "rating": 1}, {"text": "b", "rating": -1}]
    first = {"completions": candidates, "chosen_completion": 0, "human_completion": None}
    second = {**first, "completions": [{"text": "c", "rating": 1}]}
    rated = {"question": {"problem": "0?"}, "label": {"steps": [first, second]}}
    path = tmp_path / "eval.jsonl"
    path.write_text(json.dumps(rated), "utf-8")
    evaluator = StepEvaluator(recipe_of(str(path)), tokenizer)
    model, other = (
        evaluator(lambda _, scores=scores: [np.array(row) for row in scores])[0]
        for scores in ([[WRONG, WRONG], [WRONG]], [[RIGHT, WRONG], [RIGHT]])
    )
    assert [problem.key[1:] for problem in model.problems] == [(0, 0), (0, 1)]
    same = compare(model, model, 0)
    assert (same.differences["accuracy"].value, same.unpaired, same.differing()) == (0.0, 0, [])
    comparison = compare(model, other, 0)
    assert comparison.differences["accuracy"].value == 1 / 2
    assert [pair[0].answer for pair in comparison.differing()] == [1]
    assert comparison.differences.keys() == {"accuracy"}  # no problem has a rate of steps


def test_answers_whose_first_wrong_step_is_not_known_count_as_steps_alone(
    tmp_path: Path, tokenizer: Any
) -> None:
    result = evaluated([[None, 0], [1]], [[WRONG], [RIGHT]], tmp_path, tokenizer)
    assert result.rows == 2
    assert result.metrics["step_accuracy"] == 1.0
    assert result.metrics["correct"] == 1.0
    assert math.isnan(result.metrics["erroneous"])
    assert math.isnan(result.metrics["f1"])
    assert len(result.problems) == 1


def test_an_answer_without_a_finite_score_is_in_no_mean(tmp_path: Path, tokenizer: Any) -> None:
    result = evaluated([[1], [1]], [[math.nan], [RIGHT]], tmp_path, tokenizer)
    assert (result.rows, result.failed) == (2, 1)
    assert result.metrics["accuracy"] == result.metrics["step_accuracy"] == 1.0


def test_first_wrong_is_minus_1_where_all_are_right() -> None:
    assert first_wrong(np.array([True, False, False])) == 1
    assert first_wrong(np.array([True, True])) == -1


def test_the_interval_of_a_harmonic_mean_is_that_of_the_rate_where_the_other_is_certain() -> None:
    first, second = [1.0] * 30 + [0.0] * 10, [1.0] * 10**7
    mean, (low, high) = harmonic_interval(first, second)
    a, (a_low, a_high) = 0.75, wilson(0.75, 40)
    assert mean == pytest.approx(2 * a / (a + 1))
    assert low == pytest.approx(2 * a_low / (a_low + 1), abs=1e-6)
    assert high == pytest.approx(2 * a_high / (a_high + 1), abs=1e-6)


def test_a_harmonic_mean_of_0_has_an_upper_end() -> None:
    mean, (low, high) = harmonic_interval([0.0] * 5, [1.0] * 5)
    assert (mean, low) == (0.0, 0.0)
    assert 0.3 < high < 0.7


def test_intervals_of_rates_and_losses_over_two_answers_end_where_these_can_be(
    tmp_path: Path, tokenizer: Any
) -> None:
    result = evaluated([[1], [1, 0]], [[RIGHT], [WRONG, RIGHT]], tmp_path, tokenizer)
    assert result.metrics["step_accuracy"] == pytest.approx(1 / 3)
    assert result.intervals["step_accuracy"] == (0.0, 1.0)
    low, high = result.intervals["loss"]
    assert low == 0.0
    assert high > result.metrics["loss"]
