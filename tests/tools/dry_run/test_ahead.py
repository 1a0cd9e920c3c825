"""What would fail hours later, each found with its message before anything runs."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from postgrad.core.records import Prompt
from postgrad.data.account import RowAccount
from postgrad.data.conversations import Conversation
from postgrad.data.draws import DrawnSet
from postgrad.observe.console import Console
from postgrad.observe.run_dir import RunDirectory
from postgrad.plan.plan import RunPlan
from postgrad.tools.dry_run import ahead
from postgrad.tools.dry_run.data import Sets
from postgrad.tools.dry_run.outcome import FAILURE, RECIPE, Report


@pytest.fixture
def report(console: Console) -> Report:
    return Report(console)


def conversations(count: int) -> Sets:
    ids = np.array([1, 2, 3], np.int32)
    rows = [Conversation(n, n, ids, np.array([False, True, True])) for n in range(count)]
    return Sets(DrawnSet(rows, RowAccount("rows", count, {"kept": count}, {}), True))


def prompts(*answers: str) -> Sets:
    ids = np.array([1], np.int32)
    rows = [Prompt(n, ids, "q", answer, "rows", n) for n, answer in enumerate(answers)]
    account = RowAccount("rows", len(rows), {"kept": len(rows)}, {})
    return Sets(DrawnSet(rows, account, True))


def page(hours: float, steps: int = 10) -> Any:
    return SimpleNamespace(
        plan=SimpleNamespace(
            timing=SimpleNamespace(hours=hours), geometry=SimpleNamespace(steps=steps)
        )
    )


def message(report: Report, exit_code: int = RECIPE) -> str:
    (problem,) = report.problems
    assert problem.exit_code == exit_code
    return problem.message


def test_a_run_that_does_not_fit_is_told_with_the_first_advice(
    report: Report, make_recipe: Any
) -> None:
    recipe = make_recipe("sft", model={"path": "Qwen/Qwen2.5-7B"})
    advised = ahead.check_plan(report, recipe, "RTX-4090")
    assert advised is not None
    assert isinstance(advised.plan, RunPlan)
    text = message(report)
    assert "does not fit" in text
    assert advised.advice[0].change in text
    assert report.plan["fits"] is False


def test_a_device_that_nobody_knows_only_means_that_there_is_no_plan(
    report: Report, make_recipe: Any
) -> None:
    assert ahead.check_plan(report, make_recipe("sft"), "HAL-9000") is None
    assert report.problems == []
    assert "the plan failed" in report.warnings[0].message


def test_a_run_dir_that_holds_another_run_is_found(report: Report, make_recipe: Any) -> None:
    recipe, other = make_recipe("sft"), make_recipe("sft", seed=7)
    directory = RunDirectory.create(Path(recipe.run_dir), other.dump(), overwrite=False)
    (directory.path / "metrics.jsonl").write_text("{}\n", "utf-8")
    ahead.check_run_dir(report, recipe)
    assert "seed" in message(report)


def test_a_run_dir_that_goes_on_is_no_problem(report: Report, make_recipe: Any) -> None:
    recipe = make_recipe("sft")
    directory = RunDirectory.create(Path(recipe.run_dir), recipe.dump(), overwrite=False)
    (directory.path / "metrics.jsonl").write_text("{}\n", "utf-8")
    ahead.check_run_dir(report, recipe)
    assert report.problems == []
    assert "continues after step 0" in report.checks[0].detail


def test_a_run_dir_under_a_file_is_found(report: Report, make_recipe: Any, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("", "utf-8")
    ahead.check_run_dir(report, make_recipe("sft", "file/run"))
    assert "cannot be created" in message(report, FAILURE)


def test_a_logger_whose_package_is_missing_is_found(
    report: Report, make_recipe: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = make_recipe("sft", observe={"loggers": ["wandb"]})
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    ahead.check_loggers(report, recipe)
    assert "pip install 'postgrad[wandb]'" in message(report)


def test_warm_up_longer_than_the_run_is_found_once_the_rows_are_counted(
    report: Report, make_recipe: Any
) -> None:
    recipe = make_recipe("sft", steps=None, epochs=1, learner={"warmup_updates": 6})
    ahead.check_batches(report, recipe, conversations(40), None)
    assert "learner.warmup_updates = 6 is more than the 5 updates" in report.warnings[0].message


def test_hours_without_a_checkpoint_are_told(report: Report, make_recipe: Any) -> None:
    ahead.check_batches(report, make_recipe("sft"), conversations(40), page(hours=3.0))
    assert "nothing is saved before the end of about 3.0 hours" in report.warnings[0].message
    report.warnings.clear()
    saving = make_recipe("sft", checkpoint={"save_minutes": 20})
    ahead.check_batches(report, saving, conversations(40), page(hours=3.0))
    assert report.warnings == []


def test_saves_and_evaluations_that_would_never_come_are_told(
    report: Report, make_recipe: Any
) -> None:
    recipe = make_recipe("sft", checkpoint={"save_steps": 100}, eval={"every": 50})
    ahead.check_batches(report, recipe, conversations(40), None)
    warnings = " ".join(warning.message for warning in report.warnings)
    assert "checkpoint.save_steps = 100" in warnings
    assert "eval.every = 50" in warnings


def test_metrics_that_a_few_rows_do_not_have_are_known_all_the_same(
    report: Report, make_recipe: Any
) -> None:
    recipe = make_recipe("sft", checkpoint={"best_metric": "eval/pass@2"})
    ahead.check_best_metric(report, recipe, {"eval/accuracy"}, Sets())
    assert report.problems == []


def test_a_disk_without_room_for_all_checkpoints_is_found(
    report: Report, make_recipe: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = make_recipe("rl", checkpoint={"max_ckpt_num": 5, "save_hf": True})
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=4 * 10**9))
    ahead.check_disk(report, recipe, checkpoint=10**9, model=10**8, page=None)
    text = message(report, FAILURE)
    assert "checkpoint.max_ckpt_num" in text
    assert "6.10 GB" in text  # five kept, one being written, and the model
    report.problems.clear()
    ahead.check_disk(report, recipe, checkpoint=10**8, model=10**8, page=None)
    assert report.problems == []


def test_checkpoints_that_are_never_removed_need_room_too(
    report: Report, make_recipe: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    saves = {"save_steps": 1, "keep_steps": 2, "max_ckpt_num": 2}
    recipe = make_recipe("sft", checkpoint=saves)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=6 * 10**9))
    ahead.check_disk(report, recipe, checkpoint=10**9, model=0, page=page(1.0, steps=8))
    text = message(report, FAILURE)  # of steps 2, 4, 6, 8, two newest, one being written
    assert "(7 at one time)" in text
    assert "raise checkpoint.keep_steps" in text


def test_a_run_that_saves_once_needs_room_for_two(
    report: Report, make_recipe: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = make_recipe("sft", checkpoint={"max_ckpt_num": 5})
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=3 * 10**9))
    ahead.check_disk(report, recipe, checkpoint=10**9, model=0, page=page(1.0))
    assert report.problems == []


def test_answers_longer_than_what_may_be_sampled_are_told(report: Report, make_recipe: Any) -> None:
    def tokenizer(texts: list[str], **_: Any) -> dict[str, list[list[int]]]:
        return {"input_ids": [list(range(len(text))) for text in texts]}

    recipe = make_recipe("rl", rollout={"max_new_tokens": 6})
    ahead.check_answer_lengths(report, recipe, prompts("short", "much too long"), tokenizer)
    assert "1 of 2 reference answers have 6 tokens or more" in report.warnings[0].message
    report.warnings.clear()
    ahead.check_answer_lengths(report, recipe, prompts("short", "brief"), tokenizer)
    assert report.warnings == []
    ahead.check_answer_lengths(report, recipe, prompts("letter"), tokenizer)  # no room for an end
    assert "1 of 1 reference answers have 6 tokens or more" in report.warnings[0].message


def test_answers_that_may_end_at_the_limit_are_told_only_where_they_are_longer(
    report: Report, make_recipe: Any
) -> None:
    def tokenizer(texts: list[str], **_: Any) -> dict[str, list[list[int]]]:
        return {"input_ids": [list(range(len(text))) for text in texts]}

    off = {"truncation": {"action": "off"}}
    recipe = make_recipe("rl", rollout={"max_new_tokens": 6}, sentinels=off)
    ahead.check_answer_lengths(report, recipe, prompts("letter"), tokenizer)
    assert report.warnings == []
    ahead.check_answer_lengths(report, recipe, prompts("letters"), tokenizer)
    assert "1 of 1 reference answers have 7 tokens or more" in report.warnings[0].message


def test_a_report_is_json_and_a_wrong_recipe_comes_before_a_failure(report: Report) -> None:
    with report.check("one") as check:
        report.problem(check, "it failed", FAILURE)
    assert report.exit_code == FAILURE
    with report.check("two"):
        raise ValueError("of somebody else's code")
    with report.check("three") as check:
        report.problem(check, "it is wrong")
    report.skip("four", "three failed")
    assert report.exit_code == RECIPE
    report_json = json.loads(json.dumps(report.to_json()))
    assert [check["ok"] for check in report_json["checks"]] == [False] * 4
    assert [check["tried"] for check in report_json["checks"]] == [True, True, True, False]
    assert report_json["problems"][1]["message"] == "ValueError: of somebody else's code"
    assert [problem["kind"] for problem in report_json["problems"]] == [
        "failure",
        "failure",
        "recipe",
    ]
