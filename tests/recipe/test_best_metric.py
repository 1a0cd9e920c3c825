"""checkpoint.best_metric: what the evaluations of a recipe measure, known before anything runs."""

from typing import Any

import pytest

from helpers.tiny_runs import recipe_in
from postgrad.core.errors import UsageError
from postgrad.recipe.load import parse_recipe

SETS = [{"path": "one.jsonl", "name": "one"}, {"path": "two.jsonl", "name": "two"}]
STEPS: dict[str, Any] = {
    "job": "reward",
    "run_dir": "run",
    "steps": 1,
    "model": {"path": "some/model"},
    "algorithm": {"type": "process_reward"},
    "data": {"path": "steps.jsonl"},
    "eval": {"path": "held.jsonl"},
}


def check_best(tmp_path: Any, job: str, metric: str, **changes: Any) -> None:
    if job in ("reward", "preference"):
        changes["eval"] = {"path": "held.jsonl", **changes.get("eval", {})}
    mode = "min" if metric.endswith("/loss") else "max"
    changes["checkpoint"] = {"best_metric": metric, "best_mode": mode}
    recipe_in(tmp_path, job, "run", changes)


@pytest.mark.parametrize(
    ("job", "metric", "changes"),
    [
        ("rl", "eval/pass@2", {}),
        ("rl", "eval/greedy_accuracy", {}),
        ("rl", "eval/reward/vowels", {}),
        ("rl", "eval/accuracy/algebra", {}),  # rows decide which values there are
        ("rl", "eval/left_out@2", {}),
        ("rl", "eval/two/truncated_fraction", {"eval": {"path": None, "sets": SETS}}),
        ("sft", "eval/loss", {"eval": {"loss": True}}),
        ("sft", "eval/accuracy", {"eval": {"loss": True}}),
        ("reward", "eval/margin", {}),
        ("preference", "eval/reward_chosen", {}),
    ],
)
def test_what_evaluations_measure_may_be_best(
    job: str, metric: str, changes: dict[str, Any], tmp_path: Any
) -> None:
    check_best(tmp_path, job, metric, **changes)


@pytest.mark.parametrize(
    ("job", "metric", "changes", "why"),
    [
        ("sft", "loss", {}, "'loss' is no metric of an evaluation"),
        ("sft", "eval/loss", {}, "'eval/loss' is not what .* measure: eval/accuracy, eval/pass@2"),
        ("rl", "eval/acuracy", {}, "'eval/acuracy' is not what .* measure: eval/accuracy, "),
        ("rl", "eval/pass@4", {}, "'eval/pass@4' is not what this recipe's evaluations measure"),
        ("rl", "eval/maj@2", {}, "'eval/maj@2' is not what this recipe's evaluations measure"),
        ("rl", "eval/reward/vowel", {}, ".* measure: .*eval/reward/vowels"),
        ("rl", "eval/accuracy", {"eval": {"path": None, "sets": SETS}},
         ".* measure: eval/one/accuracy, .*eval/two/accuracy"),
        ("rl", "eval/left_out@3", {}, "'eval/left_out@3' is not what .* measure: eval/accuracy"),
        ("reward", "eval/loss", {}, ".* measure: eval/accuracy, eval/margin"),
        ("reward", "eval/left_out@1", {}, ".* measure: eval/accuracy, eval/margin"),
        ("preference", "eval/environment/turns", {}, ".* measure: eval/accuracy, eval/margin"),
        ("rl", "eval/accuracy", {"eval": {"at_start": False, "at_end": False}},
         r"'eval/accuracy' is never measured: give eval\.every"),
    ],
)  # fmt: skip
def test_what_they_never_measure_is_refused_with_the_names_of_what_they_do(
    job: str, metric: str, changes: dict[str, Any], why: str, tmp_path: Any
) -> None:
    with pytest.raises(UsageError, match=rf"checkpoint\.best_metric: {why}"):
        check_best(tmp_path, job, metric, **changes)


def test_process_rewards_have_metrics_of_their_own() -> None:
    parse_recipe({**STEPS, "checkpoint": {"best_metric": "eval/f1"}})
    with pytest.raises(UsageError, match=r"eval/margin' is not what .*measure: .*eval/erroneous"):
        parse_recipe({**STEPS, "checkpoint": {"best_metric": "eval/margin"}})
