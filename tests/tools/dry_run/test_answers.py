"""Verifiers on answers that are right and on none."""

import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from postgrad.core.records import Prompt
from postgrad.models.tokenizer import load_tokenizer
from postgrad.observe.console import Console
from postgrad.rewards.registry import build
from postgrad.rewards.settings import RewardSettings
from postgrad.rewards.verifier import PromptView, RolloutView, Score
from postgrad.tools.dry_run.answers import Tried, report_doubts, try_answers
from postgrad.tools.dry_run.outcome import Report

KNOWING = """
from postgrad.rewards.verifier import Verifier


class Unknowing(Verifier):
    def score(self, prompt, rollout):
        return float(rollout.text == prompt.answer)


class Doubled(Verifier):
    def right_answer(self, prompt):
        return prompt.answer * 2

    def score(self, prompt, rollout):
        return float(rollout.text == prompt.answer * 2)


class Stubborn(Doubled):
    def score(self, prompt, rollout):
        return 0.0


class Failing(Unknowing):
    def right_answer(self, prompt):
        return prompt.metadata["solution"]
"""


@pytest.fixture
def report(console: Console) -> Report:
    return Report(console)


def prompts(*answers: str) -> list[Prompt]:
    ids = np.array([1], np.int32)
    return [Prompt(n, ids, "q", answer, "rows", n) for n, answer in enumerate(answers)]


def tried(*scores: tuple[float, float], sure: bool = True) -> Tried:
    rows = prompts(*(["an answer"] * len(scores)))
    attempts = [(row, "an answer", *pair) for row, pair in zip(rows, scores, strict=True)]
    return Tried("gsm8k", sure, attempts)


def judged(
    report: Report, tried_rewards: Tried, kind: str = "gsm8k"
) -> tuple[list[str], list[str]]:
    with report.check("verifiers") as check:
        report_doubts(report, check, tried_rewards, RewardSettings(type=kind))
    return [problem.message for problem in report.problems], [
        warning.message for warning in report.warnings
    ]


@pytest.mark.parametrize(
    ("reward", "answer"),
    [
        ({"type": "gsm8k"}, "4 + 4 = 8\n#### 8"),
        ({"type": "gsm8k"}, "1,200"),
        ({"type": "math"}, r"\frac{1}{2}"),
        ({"type": "math"}, r"$x^2$"),
        ({"type": "exact_match"}, "Paris"),
        ({"type": "f1"}, '["the sun", "a star"]'),
        ({"type": "multiple_choice", "options": ""}, "C"),
    ],
)
def test_what_a_verifier_calls_right_has_its_full_score(
    reward: dict[str, Any], answer: str
) -> None:
    verifier, prompt = build(RewardSettings.model_validate(reward)), PromptView("q", answer)
    text = verifier.right_answer(prompt)
    assert text is not None
    score = verifier.score(prompt, RolloutView(text))
    assert (score.value if isinstance(score, Score) else score) == 1.0


def test_reference_answers_are_scored_by_the_runs_own_verifiers(
    report: Report, make_recipe: Any, models: Any
) -> None:
    behind = {"type": "gsm8k", "name": "behind", "after": "</think>"}
    recipe = make_recipe("rl", rewards=[{"type": "gsm8k"}, behind])
    rows = prompts("1 + 1 = 2\n#### 2", "#### 17")
    try_answers(report, recipe, [(recipe.data, rows)], load_tokenizer(models(0)))
    assert report.problems == []
    read, scored = (check.detail for check in report.checks)
    assert (read, scored) == ("2 rows can be read", "gsm8k 2 of 2, behind 2 of 2")


def test_a_class_of_the_users_says_in_a_worker_what_is_right(
    report: Report, make_recipe: Any, models: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its code is not imported in this process."""
    (tmp_path / "knowing.py").write_text(KNOWING, "utf-8")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ["PYTHONPATH"]]))
    kinds = [{"type": f"knowing:{kind}"} for kind in ("Doubled", "Stubborn", "Unknowing")]
    shut_in = {"type": "knowing:Doubled", "name": "shut_in", "sandbox": True}
    recipe = make_recipe("rl", rewards=[*kinds, shut_in])
    by_source, tokenizer = [(recipe.data, prompts("2", "17"))], load_tokenizer(models(0))
    try_answers(report, recipe, by_source, tokenizer)
    assert report.checks[1].detail == (
        "Doubled 2 of 2, Stubborn 0 of 2, Unknowing 2 of 2, shut_in 2 of 2"
    )
    (problem,) = report.problems
    assert problem.message.startswith("Stubborn gives 2 of 2 reference answers no full score")
    assert "knowing" not in sys.modules

    failing = Report(report.console)
    recipe = make_recipe("rl", rewards=[{"type": "knowing:Failing"}])
    try_answers(failing, recipe, by_source, tokenizer)
    (problem,) = failing.problems
    assert problem.message.startswith(
        "rewards: right_answer of 'Failing' failed on row 0 of rows: KeyError: 'solution' ("
    )


def test_a_verifier_that_compares_samples_is_tried_and_not_judged_by_an_empty_answer(
    report: Report, make_recipe: Any, models: Any
) -> None:
    rewards = [{"type": "gsm8k"}, {"type": "tiny_rewards:alone"}, {"type": "relative_length"}]
    rows, tokenizer = prompts("#### 2", "#### 17"), load_tokenizer(models(0))
    recipe = make_recipe("rl", rewards=rewards)
    try_answers(report, recipe, [(recipe.data, rows)], tokenizer)
    assert (report.problems, report.warnings) == ([], [])
    assert report.checks[1].detail == "gsm8k 2 of 2, alone 2 of 2, relative_length 0 of 2"


def test_special_tokens_are_read_of_reference_answers_as_of_samples(
    report: Report, make_recipe: Any, models: Any
) -> None:
    ended = {"type": "tiny_rewards:ended", "special_tokens": True}
    plain = {"type": "tiny_rewards:ended", "name": "plain"}
    exact = {"type": "exact_match", "special_tokens": True}
    recipe = make_recipe("rl", rewards=[ended, plain, exact])
    by_source = [(recipe.data, prompts("2", "17"))]
    try_answers(report, recipe, by_source, load_tokenizer(models(0)))
    assert report.checks[1].detail == "ended 2 of 2, plain 0 of 2, exact_match 0 of 2"
    assert "exact_match gives 2 of 2 reference answers no full score" in report.problems[0].message


def test_reference_answers_that_a_verifier_cannot_read_are_found(
    report: Report, make_recipe: Any, models: Any
) -> None:
    recipe = make_recipe("rl", rewards=[{"type": "gsm8k"}])
    rows = prompts("#### 2", "seventeen")
    try_answers(report, recipe, [(recipe.data, rows)], load_tokenizer(models(0)))
    (problem,) = report.problems
    assert problem.check == "reference answers"
    assert "1 of 2 rows" in problem.message


@pytest.mark.parametrize("bad", ["drop", "error"])
def test_each_dataset_of_one_name_has_its_own_way_with_such_rows(
    bad: str, report: Report, make_recipe: Any, models: Any
) -> None:
    recipe = make_recipe("rl", rewards=[{"type": "gsm8k"}])
    ways = ("drop", "error")
    sources = [recipe.data.model_copy(update={"on_unreadable": way}) for way in ways]
    rows = [prompts("#### 2", "seventeen" if way == bad else "#### 3") for way in ways]
    by_source = list(zip(sources, rows, strict=True))
    try_answers(report, recipe, by_source, load_tokenizer(models(0)))
    assert [problem.check for problem in report.problems] == ["reference answers"] * (
        bad == "error"
    )
    if bad == "drop":
        assert report.checks[0].detail == "3 rows can be read"


def test_right_answers_called_wrong_are_a_problem_where_they_are_most(report: Report) -> None:
    problems, _ = judged(report, tried((0.0, 0.0), (0.0, 0.0), (1.0, 0.0)))
    assert "2 of 3 reference answers no full score" in problems[0]


def test_a_few_right_answers_called_wrong_are_told(report: Report) -> None:
    problems, warnings = judged(report, tried((0.0, 0.0), (1.0, 0.0), (1.0, 0.0)))
    assert problems == []
    assert "1 of 3" in warnings[0]


def test_an_empty_answer_with_full_score_is_a_problem(report: Report) -> None:
    problems, _ = judged(report, tried((1.0, 1.0)))
    assert "an empty answer full score" in problems[0]


def test_a_judge_that_does_not_tell_answers_from_none_is_told(report: Report) -> None:
    doubtful = tried((0.5, 0.5), (0.2, 0.5), sure=False)
    assert judged(report, doubtful, "format") == ([], [])
    problems, warnings = judged(report, doubtful, "package.module:score")
    assert problems == []
    assert "no reference answer more than an empty one" in warnings[0]
