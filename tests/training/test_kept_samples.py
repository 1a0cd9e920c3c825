"""Which samples a run keeps: all, thinned, compressed; of training and of evaluations."""

from pathlib import Path
from typing import Any

import pytest

from helpers.runs import assert_same_run, lines, train_until_killed
from postgrad.core.errors import UsageError
from postgrad.observe.console import Console
from postgrad.tools.evaluate import evaluate
from postgrad.training.rl import RLJob
from postgrad.training.start import resume, train

SAMPLES = ("samples.jsonl", "eval_samples.jsonl")


def of(recipe: Any, name: str = "samples.jsonl") -> list[dict[str, Any]]:
    return lines(Path(recipe.run_dir) / name)


@pytest.mark.parametrize("job", ["sft", "rl"])
def test_every_answer_of_an_evaluation_is_kept_with_its_scores(job: str, trained: Any) -> None:
    recipe = trained(job)
    evaluations = of(recipe, "eval.jsonl")
    answers = of(recipe, "eval_samples.jsonl")
    assert {line["step"] for line in answers} == {line["step"] for line in evaluations}
    for evaluation in evaluations:
        step = [line for line in answers if line["step"] == evaluation["step"]]
        greedy = [line for line in step if line.get("greedy")]
        sampled = [line for line in step if not line.get("greedy")]
        assert (len(sampled), len(greedy)) == (8 * 2, 8)
        assert sum(line["correct"] for line in sampled) / 16 == evaluation["accuracy"]
        assert sum(line["correct"] for line in greedy) / 8 == evaluation["greedy_accuracy"]
        scores = [line["total"] for line in sampled]
        assert sum(scores) / 16 == pytest.approx(evaluation["reward"])
    first = answers[0]
    assert first["question"]
    assert isinstance(first["text"], str)
    assert first["set"] is None


@pytest.mark.slow
def test_thinned_and_compressed_samples_survive_a_kill(
    make_recipe: Any, console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes: dict[str, Any] = {
        "steps": 3,
        "eval": {"every": 1},
        "observe": {"samples": 8, "eval_samples": 3, "compress": "gzip"},
    }
    uninterrupted, killed = (make_recipe("rl", name, **changes) for name in ("whole", "killed"))
    train(uninterrupted, console)
    train_until_killed(monkeypatch, RLJob, 2, killed, console)
    resume(Path(killed.run_dir), [], [], console)
    assert_same_run(uninterrupted, killed, 3)
    for name in SAMPLES:
        packed = [Path(recipe.run_dir) / f"{name}.gz" for recipe in (uninterrupted, killed)]
        assert packed[0].read_bytes() == packed[1].read_bytes()
        assert not (Path(uninterrupted.run_dir) / name).exists()
    steps = [line["step"] for line in of(uninterrupted)]
    assert steps == sorted([1, 2, 3] * 8)  # two groups of four
    assert all(line["of"] == 16 for line in of(uninterrupted))
    asked = [
        {line["row"] for line in of(uninterrupted, "eval_samples.jsonl") if line["step"] == s}
        for s in range(4)
    ]
    assert all(rows == asked[0] for rows in asked)  # the same prompt at every evaluation


def test_thinned_samples_are_those_of_a_run_that_keeps_all(
    trained: Any, make_recipe: Any, console: Console
) -> None:
    every = of(trained("rl"))
    few = make_recipe("rl", observe={"samples": 4})
    train(few, console)
    for line in of(few):
        assert {key: line[key] for key in line if key != "of"} in every


@pytest.mark.slow
def test_a_run_that_is_resumed_keeps_the_form_of_its_files(
    make_recipe: Any, console: Console
) -> None:
    recipe = make_recipe("rl", steps=1)
    train(recipe, console)
    resume(Path(recipe.run_dir), ["--steps", "2", "--observe.compress", "gzip"], [], console)
    assert {line["step"] for line in of(recipe)} == {1, 2}
    assert not list(Path(recipe.run_dir).glob("*.gz"))


def test_eval_writes_every_answer_of_both_models(
    models: Any, make_recipe: Any, console: Console, tmp_path: Path
) -> None:
    recipe = make_recipe("rl", observe={"eval_samples": 1})
    to = tmp_path / "answers.jsonl"
    written = evaluate(recipe, models(1), console, models(2), to)
    for report in (written, written["against"]):
        of_model = [line for line in lines(to) if line["model"] == report["model"]]
        sampled = [line for line in of_model if not line.get("greedy")]
        assert (len(of_model), len(sampled)) == (24, 16)
        assert sum(line["correct"] for line in sampled) / 16 == report["accuracy"]


def test_eval_refuses_a_file_where_nothing_is_sampled(
    models: Any, make_recipe: Any, console: Console, tmp_path: Path
) -> None:
    eval_table = {"n_samples": 1, "pass_at": [1], "greedy": False, "max_new_tokens": None}
    recipe = make_recipe("sft", rewards=[], eval=eval_table)
    with pytest.raises(UsageError, match=r"--to .* samples no answers"):
        evaluate(recipe, models(1), console, to=tmp_path / "answers.jsonl")
