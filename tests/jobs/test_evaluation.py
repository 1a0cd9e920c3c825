"""Evaluation: right answers counted without bias, failures in no mean, the same every time."""

import dataclasses
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from postgrad.core.records import Prompt, Rollout, ScoredGroup, Turn
from postgrad.jobs import evaluation
from postgrad.jobs.evaluation import Evaluator, Result, sample_metrics
from postgrad.jobs.train import train
from postgrad.models.fresh import make_fresh
from postgrad.models.load import load_tokenizer
from postgrad.observe.console import Console


class Scores:
    """A scorer that is only asked for its names and its bracket."""

    names = ("first", "second")

    def step(self) -> Any:
        from contextlib import nullcontext

        return nullcontext()


def group(ticket: int, *scores: float) -> ScoredGroup:
    turn = Turn("policy", np.zeros(2 + ticket, np.int32), np.zeros(2 + ticket, np.float32))
    n = len(scores)
    rollouts = tuple(Rollout(ticket, i, (turn,), "stop", ((0, 2),), "") for i in range(n))
    prompt = Prompt(ticket, np.zeros(3, np.int32), "q", "a", "set", ticket)
    values = np.array(scores)
    kept = ~np.isnan(values)
    return ScoredGroup(prompt, rollouts, {"first": values, "second": -values}, values, kept)


@pytest.fixture
def evaluator(make_recipe: Any, tmp_path: Path) -> Evaluator:
    recipe = make_recipe(
        "rl",
        eval={"n_samples": 4, "pass_at": [1, 2, 4], "correct_at": 0.75, "greedy": True},
    )
    make_fresh(recipe.model.init, [], 0, tmp_path / "model")
    return Evaluator(recipe, load_tokenizer(str(tmp_path / "model")), Scores())  # pyright: ignore[reportArgumentType]


def test_accuracy_and_pass_at_k_count_scores_that_reach_the_mark(
    evaluator: Evaluator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two problems: 2 of 4 right; 1 of 3, where the fourth could not be scored."""
    groups = [group(0, 1.0, 0.8, 0.7, 0.0), group(1, math.nan, 0.75, 0.0, 0.0)]
    greedy = [group(0, 1.0), group(1, math.nan)]
    answers = iter([groups, greedy])
    monkeypatch.setattr(evaluation, "sample_groups", lambda *args: next(answers))
    engine: Any = None
    result = evaluator(engine, lambda n: None)[0]
    assert result.metrics["accuracy"] == pytest.approx((2 / 4 + 1 / 3) / 2)
    assert result.metrics["pass@2"] == pytest.approx(((1 - 1 / 6) + (1 - 1 / 3)) / 2)
    assert result.metrics["pass@4"] == 1.0  # only the first problem has four scored samples
    assert result.metrics["greedy_accuracy"] == 1.0
    assert result.failed == 2
    assert result.rows == 8


def test_each_row_is_judged_by_the_first_component_that_applies_to_it(
    evaluator: Evaluator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A component that does not apply is no failure, and the row is in no mean of it."""
    one, two = group(0, 1.0, 1.0), group(1, 0.0, math.nan)
    two = dataclasses.replace(two, rewards={"second": np.array([1.0, math.nan])})
    monkeypatch.setattr(evaluation, "sample_groups", lambda *args: [one, two])
    engine: Any = None
    result = evaluator(engine, lambda n: None)[0]
    assert result.metrics["accuracy"] == (2 / 2 + 1 / 1) / 2
    assert result.failed == 2  # one among the samples, and again where it is asked greedily

    evaluator.settings = evaluator.settings.model_copy(update={"component": "first"})
    result = evaluator(engine, lambda n: None)[0]
    assert result.metrics["accuracy"] == 1.0
    assert result.failed == 0


def test_a_set_without_a_name_is_eval_itself() -> None:
    one = Result(None, 1, 0, {"accuracy": 0.5}, 0.1)
    two = Result("hard", 1, 0, {"accuracy": 0.25}, 0.1)
    assert one.by_metric() | two.by_metric() == {
        "eval/accuracy": 0.5,
        "eval/hard/accuracy": 0.25,
    }
    assert one.to_json() == {
        "set": None,
        "rows": 1,
        "failed": 0,
        "accuracy": 0.5,
        "evaluate_seconds": 0.1,
    }


def test_means_are_over_kept_samples_and_lengths_over_all() -> None:
    found = sample_metrics([group(0, 1.0, math.nan), group(1, 0.5, 0.0)])
    assert found == {
        "reward": pytest.approx(0.5),
        "response_length": 2.5,
        "truncated_fraction": 0.0,
    }


def test_evaluations_of_the_same_weights_agree_whenever_they_are_made(
    make_recipe: Any, console: Console, tmp_path: Path
) -> None:
    """The end of one run and the start of the next, from its exported model."""
    first = make_recipe("sft", "first", checkpoint={"save_hf": True})
    ended = train(first, console)
    second = make_recipe("rl", "second", model={"path": ended["model"]}, steps=1)
    began = train(second, console)
    assert began["accuracy_before"] == ended["accuracy_after"]
    assert began["greedy_accuracy_before"] == ended["greedy_accuracy_after"]
