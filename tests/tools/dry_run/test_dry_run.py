"""Dry runs as a whole: nothing wrong, something wrong in a phase, nothing left behind."""

from pathlib import Path
from typing import Any

import pytest

from helpers.jobs import write_pairs
from helpers.tiny_runs import MODEL
from postgrad.checkpoint.store import CheckpointStore, SaveFailed
from postgrad.core.errors import RunError
from postgrad.observe.console import Console
from postgrad.recipe.pipeline import load_pipeline
from postgrad.tools.dry_run import trial
from postgrad.tools.dry_run.dry_run import dry_run, dry_run_pipeline, pipeline_json
from postgrad.tools.dry_run.outcome import FAILURE, RECIPE, Report
from postgrad.training import rows as training_rows

ROOT = Path(__file__).parent.parent.parent.parent
SUPERVISED = {"load", "train", "evaluate", "save", "load the checkpoint", "export", "disk"}


def passed(report: Report) -> set[str]:
    return {check.name for check in report.checks if check.ok}


def only(report: Report) -> tuple[str, str, int]:
    (problem,) = report.problems
    return problem.check, problem.message, problem.exit_code


@pytest.mark.slow
def test_a_clean_recipe_of_rl_goes_through_every_phase_and_leaves_nothing(
    make_recipe: Any, console: Console, tmp_path: Path
) -> None:
    kept = {"save_steps": 1, "keep_steps": 2}  # the small run saves once
    falling = {"schedule": "linear", "decay_updates": 3, "threads": 1}
    recipe = make_recipe("rl", checkpoint={"best_metric": "eval/accuracy", **kept}, learner=falling)
    before = sorted(tmp_path.rglob("*"))
    report = dry_run(recipe, console)
    assert report.problems == []
    assert not any(warning.check == "publish_route" for warning in report.warnings)
    assert report.exit_code == 0
    assert passed(report) >= SUPERVISED | {"sample", "publish", "verifiers", "best_metric"}
    train = next(check for check in report.checks if check.name == "train")
    assert "8 samples, loss" in train.detail
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.slow
@pytest.mark.long
def test_a_critic_and_a_reference_take_part(make_recipe: Any, console: Console) -> None:
    recipe = make_recipe(
        "rl",
        algorithm={"type": "ppo", "kl_coef": 0.1, "critic_warmup_steps": 2},
        batch={"train_batch_size": 8},
        eval={"at_start": False},
    )
    report = dry_run(recipe, console)
    assert report.problems == []
    load = next(check for check in report.checks if check.name == "load the checkpoint")
    assert int(load.detail.split()[-2]) > 60  # of the policy and of the critic


@pytest.mark.slow
@pytest.mark.parametrize("job", ["sft", "reward", "preference"])
@pytest.mark.long
def test_clean_recipes_of_the_other_jobs_pass(make_recipe: Any, console: Console, job: str) -> None:
    report = dry_run(make_recipe(job), console)
    assert report.problems == []
    assert passed(report) >= SUPERVISED - ({"evaluate"} if job != "sft" else set())


@pytest.mark.slow
def test_a_run_that_is_there_is_not_touched(make_recipe: Any, console: Console) -> None:
    recipe = make_recipe("reward")
    folder = Path(recipe.run_dir)
    folder.mkdir()
    (folder / "metrics.jsonl").write_text("not ours\n", "utf-8")
    report = dry_run(recipe, console)
    assert [problem.check for problem in report.problems] == ["run_dir"]
    assert [path.name for path in folder.iterdir()] == ["metrics.jsonl"]


def test_a_save_that_fails_is_named_and_everything_is_removed(
    make_recipe: Any, console: Console, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise SaveFailed("the disk is full")

    recipe = make_recipe("reward")
    before = sorted(tmp_path.rglob("*"))
    monkeypatch.setattr(CheckpointStore, "save", fail)
    report = dry_run(recipe, console)
    assert only(report) == ("save", "the disk is full", FAILURE)
    assert "train" in passed(report)
    assert "export" not in passed(report)
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.slow
def test_a_checkpoint_that_gives_other_bits_is_found(
    make_recipe: Any, console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, calls = trial.digests_of, []

    def other(job: Any) -> dict[str, str]:
        calls.append(job)
        hashes = real(job)
        return {name: f"{digest}{len(calls)}" for name, digest in hashes.items()}

    monkeypatch.setattr(trial, "digests_of", other)
    check, message, code = only(dry_run(make_recipe("reward"), console))
    assert (check, code) == ("load the checkpoint", FAILURE)
    assert "other bits" in message


@pytest.mark.slow
@pytest.mark.long
def test_an_export_that_cannot_be_read_is_found(
    make_recipe: Any, console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise RunError("export: the model read back gives other logits")

    monkeypatch.setattr(trial, "export", fail)
    assert only(dry_run(make_recipe("reward"), console))[0] == "export"


def test_an_interrupt_removes_everything_and_is_not_a_problem(
    make_recipe: Any, console: Console, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    recipe = make_recipe("reward")
    before = sorted(tmp_path.rglob("*"))
    monkeypatch.setattr(trial, "prepare", interrupt)
    with pytest.raises(KeyboardInterrupt):
        dry_run(recipe, console)
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.slow
@pytest.mark.long
def test_a_best_metric_that_no_evaluation_gives_is_found(
    make_recipe: Any, console: Console
) -> None:
    recipe = make_recipe(
        "sft", checkpoint={"best_metric": "eval/accuracy/x"}, eval={"n_samples": 1, "pass_at": [1]}
    )
    check, message, code = only(dry_run(recipe, console))
    assert (check, code) == ("best_metric", RECIPE)
    assert "eval/accuracy" in message


@pytest.mark.slow
def test_the_part_of_the_rows_that_is_evaluated_on_is_tried_too(
    make_recipe: Any, console: Console, tmp_path: Path
) -> None:
    rows = write_pairs(tmp_path / "rows.jsonl")
    recipe = make_recipe("reward", data={"path": str(rows), "eval_fraction": 0.3})
    report = dry_run(recipe, console)
    assert report.problems == []
    assert {"rows of eval", "evaluate"} <= passed(report)


@pytest.mark.slow
def test_a_step_whose_samples_are_all_left_out_is_told_with_the_reason(
    make_recipe: Any, console: Console
) -> None:
    masked = {"type": "grpo", "mask_truncated_completions": True}
    recipe = make_recipe("rl", algorithm=masked, rollout={"max_new_tokens": 2})
    report = dry_run(recipe, console)
    assert report.problems == []
    warnings = [warning.message for warning in report.warnings if warning.check == "train"]
    assert [why for why in warnings if "algorithm.mask_truncated_completions leaves" in why]


@pytest.mark.slow
def test_weights_of_rewards_that_an_algorithm_reads_apart_are_tried_too(
    make_recipe: Any, console: Console
) -> None:
    algorithm = {"type": "gdpo", "component_weights": {"vowels": 2.0}}
    assert dry_run(make_recipe("rl", algorithm=algorithm), console).problems == []


@pytest.mark.slow
def test_rewards_that_call_no_answer_right_are_tried_too(
    make_recipe: Any, console: Console
) -> None:
    rewards = [{"type": "target_length", "target": 3}]
    assert dry_run(make_recipe("rl", rewards=rewards), console).problems == []


@pytest.mark.slow
def test_rows_that_nothing_scores_beside_an_environment_are_found(
    make_recipe: Any, console: Console
) -> None:
    rows = {"path": "postgrad.rollout.environments.guess_number:rows", "size": 8}
    sets = [{"environment": "guess_number"}, {"environment": "none", "seed": 5}]
    recipe = make_recipe(
        "rl",
        model={"init": {**MODEL["init"], "max_position_embeddings": 160}},
        data={**rows, "task": {}, "max_len": 120, "sets": sets},
        eval={**rows, "task": {}, "environment": "guess_number"},
        environment={"sets": [{"type": "guess_number"}, {"type": "guess_number", "name": "b"}]},
        rewards=[],
    )
    problems = {problem.check: problem.message for problem in dry_run(recipe, console).problems}
    assert "no reward applies to it" in problems["reference answers"]


@pytest.mark.slow
def test_sets_with_samples_of_their_own_are_tried_with_few(
    make_recipe: Any, console: Console
) -> None:
    rows = {"path": "reasoning-gym:spell_backward", "size": 4}
    sets = [
        {**rows, "name": "many", "seed": 2, "n_samples": 64, "max_new_tokens": 8},
        {**rows, "name": "few", "seed": 3, "n_samples": 1},
    ]
    evaluation = {"path": None, "size": None, "seed": None, "sets": sets, "pass_at": [1, 64]}
    for metric, problems in (("eval/many/pass@64", []), ("eval/many/accuracy/x", ["best_metric"])):
        recipe = make_recipe("rl", eval=evaluation, checkpoint={"best_metric": metric})
        report = dry_run(recipe, console)
        assert [problem.check for problem in report.problems] == problems


@pytest.mark.slow
def test_what_failed_says_nothing_of_a_checkpoint_that_nobody_can_resume(
    make_recipe: Any, console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        training_rows, "require_votes", lambda *_: None
    )  # which the run asks before
    silent = {"n_samples": 2, "pass_at": [1], "maj_at": [2], "greedy": False}
    report = dry_run(make_recipe("sft", eval=silent), console)
    check, message, _ = only(report)
    assert (check, message[:12]) == ("evaluate", "eval.maj_at:")
    assert "checkpoint of step" not in message


@pytest.mark.slow
@pytest.mark.long
def test_a_verifier_that_fails_is_found_before_the_step(make_recipe: Any, console: Console) -> None:
    recipe = make_recipe("sft", rewards=[{"type": "tiny_rewards:broken"}])
    report = dry_run(recipe, console)
    problems_by_check = {problem.check: problem for problem in report.problems}
    assert "no score today" in problems_by_check["verifiers"].message
    assert problems_by_check["verifiers"].exit_code == FAILURE
    assert "evaluate" in problems_by_check


def test_several_things_that_are_wrong_are_all_told(
    make_recipe: Any, console: Console, models: Any
) -> None:
    recipe = make_recipe(
        "sft",
        model={"path": models(0)},
        eval={"path": "nowhere.jsonl"},
        data={"path": "neither.jsonl"},
    )
    report = dry_run(recipe, console)
    assert {problem.check for problem in report.problems} >= {"rows of eval", "rows"}
    assert report.exit_code == RECIPE


@pytest.mark.slow
def test_stages_of_a_pipeline_start_from_what_the_one_before_exported(
    console: Console, tmp_path: Path
) -> None:
    small = ["--data.size", "40", "--eval.size", "4", "--sft.model.init.hidden_size", "24"]
    more = ["--learner.threads", "1", "--scoring.workers", "1"]
    flags = [*small, *more, "--run_dir", str(tmp_path / "run")]
    reports = dry_run_pipeline(load_pipeline(ROOT / "recipes" / "quickstart", flags), console)
    assert list(reports) == ["sft", "rl"]
    page = pipeline_json(reports)
    assert page["problems"] == []
    assert "sample" in passed(reports["rl"])
    assert list(tmp_path.iterdir()) == []


def test_stages_that_read_generated_rows_are_not_tried(console: Console, tmp_path: Path) -> None:
    flags = ["--sft.data.path", "nowhere.jsonl", "--run_dir", str(tmp_path / "run")]
    reports = dry_run_pipeline(load_pipeline(ROOT / "recipes" / "best_of_n", flags), console)
    assert reports["sft"].exit_code == RECIPE
    for name, why in (("answers", "gave none"), ("best_of_n", "generated by the stage answers")):
        (skipped,) = reports[name].checks
        assert skipped.outcome == "not tried"
        assert why in skipped.detail


@pytest.mark.slow
def test_a_stage_that_generates_samples_two_prompts(console: Console, tmp_path: Path) -> None:
    small = ["--sft.data.size", "40", "--eval.size", "4", "--sft.model.init.hidden_size", "24"]
    more = ["--learner.threads", "1", "--scoring.workers", "1", "--answers.data.size", "20"]
    flags = [*small, *more, "--run_dir", str(tmp_path / "run")]
    reports = dry_run_pipeline(load_pipeline(ROOT / "recipes" / "best_of_n", flags), console)
    assert pipeline_json(reports)["problems"] == []
    assert [check.name for check in reports["answers"].checks] == ["recipe", "generate"]
    assert reports["answers"].checks[1].detail == "2 prompts answered and scored"
    assert list(tmp_path.iterdir()) == []


def test_a_stage_whose_model_could_not_be_made_is_not_tried(
    console: Console, tmp_path: Path
) -> None:
    flags = ["--sft.data.path", "nowhere.jsonl", "--run_dir", str(tmp_path / "run")]
    reports = dry_run_pipeline(load_pipeline(ROOT / "recipes" / "quickstart", flags), console)
    assert reports["sft"].exit_code == RECIPE
    (skipped,) = reports["rl"].checks
    assert skipped.outcome == "not tried"
    assert "sft" in skipped.detail
