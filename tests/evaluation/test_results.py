"""Rates over problems, and how they are written and told."""

import dataclasses
import math

import pytest

from postgrad.evaluation.results import (
    EvaluatedProblem,
    Result,
    by_dataset,
    left_out,
    note_of_answer,
    plus_minus,
    rates,
    wrong_answers,
)
from postgrad.ops.intervals import Interval, mean_interval
from postgrad.recipe.answering import READ_ANSWERS
from postgrad.rewards.registry import build
from postgrad.rewards.settings import RewardSettings
from postgrad.rewards.verifier import PromptView, RolloutView, Score


def problem(
    right: int, n: int, dataset: str = "a", greedy: tuple[int, int] | None = None
) -> EvaluatedProblem:
    return EvaluatedProblem(dataset, 0, "q", (n, right), greedy, "text")


def test_problems_with_too_few_scored_samples_are_left_out_of_the_mean() -> None:
    problems = [problem(2, 4), problem(1, 1), problem(0, 0)]
    rated = rates(problems, (1, 2))
    assert rated["accuracy"] == (0.75, mean_interval([0.5, 1.0]))
    assert rated["pass@2"] == (pytest.approx(5 / 6), mean_interval([1 - 1 / 6]))
    assert list(rated) == ["accuracy", "pass@2"]


def test_how_many_problems_each_k_leaves_out_is_counted_and_told() -> None:
    problems = [problem(2, 4), problem(1, 1), problem(0, 0)]
    counts = left_out(problems, (1, 2, 4))
    assert counts == {"left_out@1": 1.0, "left_out@2": 2.0, "left_out@4": 2.0}
    assert left_out(problems, (4,)) == {"left_out@1": 1.0, "left_out@4": 2.0}  # accuracy's too
    metrics = {"accuracy": 0.75, "pass@2": 0.5, **counts}
    assert Result(None, 3, 5, metrics, 0.1).texts() == [
        "accuracy 0.750 (1 of 3 problems left out)",
        "pass@2 0.500 (2 of 3 problems left out)",
    ]
    complete_metrics = {"accuracy": 0.75, **left_out([problem(1, 1)], (1,))}
    assert Result(None, 1, 0, complete_metrics, 0.1).texts() == ["accuracy 0.750"]
    tiny = Result(None, 1, 0, {"margin": -1e-9, "loss": 3.2e-5}, 0.1)
    assert tiny.texts() == ["margin 0", "loss 3.2e-05"]  # neither "-0.000" nor "0.000"


def test_a_majority_counts_different_wrong_answers_apart() -> None:
    """3 right of 8 win against 2, 1 and 1 where one sample is silent; 1 of 2 is a tie."""
    first = dataclasses.replace(problem(3, 8), wrong=(2, 1, 1))
    second = dataclasses.replace(problem(1, 2), wrong=(1,))
    rated = rates([first, second, dataclasses.replace(problem(0, 1), wrong=(1,))], (1,), (2, 8))
    assert rated["maj@8"][0] == 1.0  # of the first problem alone
    # 28 choices of 2: 3 of two right ones, 3 * 4 with a wrong one, 3 * 1 with the silent one
    assert rated["maj@2"][0] == pytest.approx(((3 + 12 / 2 + 3) / 28 + 0.5) / 2)
    assert list(rated) == ["accuracy", "maj@2", "maj@8"]


def test_wrong_answers_vote_by_what_they_say() -> None:
    details = [{"answer": a} for a in ("8", "1,000", " 1000. ", "2000/2", "$1000.0$", "1/2", None)]
    scores = [1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0]
    assert wrong_answers(scores, details, 1.0) == (4, 1)
    assert wrong_answers([1.0, math.nan, *scores[2:]], details, 1.0) == (3, 1)


@pytest.mark.parametrize(
    ("answers", "counts"),
    [
        (("1,2", "12", "1/2/3", "1/23"), (1, 1, 1, 1)),
        (("x + 1", "x+1", "1+x"), (2, 1)),
        ((r"\frac{1}{2}", r"\dfrac{2}{4}", "0.50", ".5"), (3, 1)),
        (("-1/3", r"-\frac{2}{6}", "1/3", "1/0", "0/00"), (2, 1, 1, 1)),
        (("9e999999999", "9" * 60, "9" * 60, "nan", "1.", "01"), (2, 2, 1, 1)),
    ],
)
def test_wrong_answers_of_one_value_vote_together(
    answers: tuple[str, ...], counts: tuple[int, ...]
) -> None:
    details = [{"answer": answer} for answer in answers]
    assert wrong_answers([0.0] * len(answers), details, 1.0) == counts


@pytest.mark.parametrize("kind", [k for k in READ_ANSWERS if k != "reasoning_gym"])
def test_verifiers_that_can_vote_note_the_answer_that_they_read(kind: str) -> None:
    """That of reasoning-gym has a test with its own rows."""
    settings = {"options": ""} if kind == "multiple_choice" else {}
    verifier = build(RewardSettings.model_validate({"type": kind, **settings}))
    answer = "#### 8" if kind == "gsm8k" else "A" if kind == "multiple_choice" else "8"
    prompt = PromptView("q", answer)
    score = verifier.score(prompt, RolloutView(verifier.right_answer(prompt) or ""))
    assert isinstance(score, Score)
    note = note_of_answer(score.detail)
    assert note is not None
    assert note["answer"]


def test_an_answer_is_read_also_where_a_formula_was_refused_and_else_votes_for_nothing() -> None:
    details = [{"score": {"answer": "7"}, "refused": ["f"]}, {"answer": "7"}, None, {"fault": ""}]
    assert wrong_answers([0.0] * 4, details, 1.0) == (2,)


def test_a_rate_that_nothing_was_scored_for_is_not_a_number() -> None:
    mean, interval = rates([problem(0, 0, greedy=(0, 0))], (1,))["greedy_accuracy"]
    assert math.isnan(mean)
    assert math.isnan(interval.low)


def test_one_dataset_is_not_told_twice() -> None:
    assert by_dataset([problem(1, 1), problem(0, 1)], (1,)) == {}
    rated = by_dataset([problem(1, 1, "b"), problem(0, 1, "a"), problem(0, 1, "b")], (1,))
    assert list(rated) == ["rows/a", "accuracy/a", "rows/b", "accuracy/b"]
    assert rated["accuracy/b"][0] == 0.5
    assert rated["rows/b"] == (2, None)


def test_a_set_without_a_name_is_eval_itself() -> None:
    unnamed = Result(None, 1, 0, {"accuracy": 0.5}, 0.1)
    named = Result("hard", 1, 0, {"accuracy": 0.25}, 0.1)
    assert unnamed.by_metric() | named.by_metric() == {
        "eval/accuracy": 0.5,
        "eval/hard/accuracy": 0.25,
    }


def test_rates_that_mean_nothing_are_in_files_and_not_shown() -> None:
    metrics = {"accuracy": 0.0, "left_out@1": 0.0, "reward": 1.5, "reward/reward_model": 1.5}
    intervals = {"accuracy": Interval(0.0, 0.2)}
    result = Result(None, 8, 0, metrics, 0.1, intervals, rated=False)
    assert result.texts() == ["reward 1.500"]
    assert result.to_json()["accuracy"] == 0.0
    assert result.by_metric()["eval/accuracy"] == 0.0
    assert "eval/accuracy" not in result.by_metric(shown=True)
    measured = Result(None, 8, 0, {"loss": 0.5}, 0.1, {"loss": Interval(0.4, 0.6)}, rated=False)
    assert measured.texts() == ["loss 0.500 ± 0.100"]


def test_the_mean_of_the_component_that_judges_is_shown_beside_that_of_all() -> None:
    metrics = {"accuracy": 0.0, "reward": 1.5, "reward/reward_model": 1.5, "reward/gold": 0.1}
    result = Result(None, 8, 0, metrics, 0.1, judge="gold")
    assert result.texts() == ["accuracy 0", "reward 1.500", "reward/gold 0.100"]
    alone = {"accuracy": 0.0, "reward": 0.1, "reward/gold": 0.1}
    assert Result(None, 8, 0, alone, 0.1, judge="gold").texts() == ["accuracy 0", "reward 0.100"]


def test_a_line_of_eval_jsonl_has_the_ends_behind_their_rate() -> None:
    metrics = {"accuracy": 0.5, "reward": 1.0, "accuracy/x/y": 0.25}
    intervals = {"accuracy": Interval(0.4, 0.7), "accuracy/x/y": Interval(0.1, 0.5)}
    result = Result("hard", 8, 1, metrics, 0.1, intervals)
    assert list(result.to_json().items()) == [
        ("set", "hard"),
        ("rows", 8),
        ("failed", 1),
        ("accuracy", 0.5),
        ("accuracy_low", 0.4),
        ("accuracy_high", 0.7),
        ("reward", 1.0),
        ("accuracy/x/y", 0.25),
        ("accuracy_low/x/y", 0.1),
        ("accuracy_high/x/y", 0.5),
        ("evaluate_seconds", 0.1),
    ]
    assert result.texts() == ["hard/accuracy 0.500 ± 0.200", "hard/reward 1.000"]


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ([0.0], " (0.000 to 0.793)"),
        ([1.0], " (0.207 to 1.000)"),
        ([0.0] * 100, " (0.000 to 0.037)"),
        ([0.0, 1.0], " ± 0.405"),
        ([1.0] * 2 + [0.0] * 98, " (0.006 to 0.070)"),
        ([1.0] * 50 + [0.0] * 50, " ± 0.096"),
        ([], ""),
    ],
)
def test_an_interval_that_is_no_distance_is_shown_by_its_ends(
    values: list[float], text: str
) -> None:
    """Wilson's interval by hand: the upper end of 0 of n is z² / (n + z²)."""
    rate = sum(values) / len(values) if values else 0.0
    assert plus_minus(rate, mean_interval(values)) == text
