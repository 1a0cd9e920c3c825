"""The quickstart in small: SFT, RL from its model, export, answers by plain transformers."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from helpers.tiny_runs import MakeRecipe
from postgrad.core.errors import RunError, UsageError
from postgrad.models.save import directory_hash
from postgrad.models.tokenizer import load_tokenizer
from postgrad.observe.console import Console
from postgrad.recipe.load import parse_recipe
from postgrad.recipe.pipeline import load_pipeline
from postgrad.recipe.recipe import RLRecipe
from postgrad.tools.asking import ask
from postgrad.tools.export import export
from postgrad.tools.pipeline import train_pipeline
from postgrad.training.rows import evaluated, prompts

ROOT = Path(__file__).parent.parent.parent
SMALL = [
    "--sft.steps", "2", "--rl.steps", "2", "--data.size", "64", "--eval.size", "8",
    "--sft.model.init.hidden_size", "24", "--sft.model.init.num_hidden_layers", "1",
    "--sft.learner.warmup_updates", "0", "--rl.learner.warmup_updates", "0",
    "--rl.batch.rollout_batch_size", "4", "--rl.batch.n_samples_per_prompt", "2",
    "--learner.threads", "1", "--scoring.workers", "1",
]  # fmt: skip


def quickstart(run: Path) -> dict[str, Any]:
    flags = [*SMALL, "--run_dir", str(run)]
    return train_pipeline(load_pipeline(ROOT / "recipes" / "quickstart", flags), Console("quiet"))


class Ended(NamedTuple):
    """A whole pipeline: what it returned, its folder, and a copy of that which nothing goes on."""

    summary: dict[str, Any]
    run: Path
    left: Path


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Ended:
    run = tmp_path_factory.mktemp("quickstart") / "run"
    summary = quickstart(run)
    return Ended(summary, run, Path(shutil.copytree(run, run.with_name("left"))))


@pytest.mark.slow
def test_the_summary_has_what_people_look_for(ended: Ended) -> None:
    summary = ended.summary
    written = json.loads((ended.left / "summary.json").read_text("utf-8"))
    assert written == summary
    assert 0.0 <= summary["accuracy_before"] <= 1.0
    assert 0.0 <= summary["accuracy_after"] <= 1.0
    assert summary["peak_memory_bytes"] > 10**8
    assert summary["seconds"] > 0
    assert list(summary["stages"]) == ["sft", "rl"]
    assert summary["stages"]["sft"]["accuracy_after"] == summary["accuracy_before"]
    answers = summary["answers"]
    assert len(answers) == 3
    for answer in answers:
        word = answer["question"].rpartition(": ")[2]
        assert answer["reference"] == word[::-1]


def test_the_questions_at_the_end_are_of_the_part_that_is_held_out(
    make_recipe: MakeRecipe, models: Callable[[int], str]
) -> None:
    model = {"path": models(0), "init": None}
    raw = make_recipe("rl", model=model).dump()
    raw["data"]["eval_fraction"] = 0.25
    raw["eval"] = {"max_new_tokens": 6}
    recipe = parse_recipe(raw)
    assert isinstance(recipe, RLRecipe)
    asked = [answer.question for answer in ask(models(0), recipe, 3)]
    tokenizer = load_tokenizer(models(0))
    held_out = [prompt.question for prompt in evaluated(recipe, 0, tokenizer).all()]
    trained = {prompt.question for prompt in prompts(recipe, tokenizer).all()}
    assert asked == held_out[:3]
    assert len(held_out) > 3
    assert not trained & set(asked)


@pytest.mark.slow
def test_what_is_held_out_is_never_trained_on(ended: Ended) -> None:
    held_out = {answer["question"].casefold() for answer in ended.summary["answers"]}
    seen = [
        json.loads(line)["question"].casefold()
        for line in (ended.left / "rl" / "samples.jsonl").open(encoding="utf-8")
    ]
    assert len(seen) == 2 * 4 * 2
    assert not held_out & set(seen)


@pytest.mark.slow
def test_a_checkpoint_is_exported_without_the_run(ended: Ended, tmp_path: Path) -> None:
    to = export(ended.left / "rl", "latest", tmp_path / "model")
    assert directory_hash(to) == directory_hash(ended.left / "rl" / "model")


@pytest.mark.slow
def test_the_same_command_goes_on_after_a_kill(ended: Ended) -> None:
    metrics = (ended.left / "rl" / "metrics.jsonl").read_bytes()
    again = quickstart(ended.run)
    assert again["accuracy_after"] == ended.summary["accuracy_after"]
    assert (ended.run / "rl" / "metrics.jsonl").read_bytes() == metrics


@pytest.mark.slow
def test_a_pipeline_that_has_ended_does_nothing(ended: Ended) -> None:
    quickstart(ended.run)
    files = [path for path in ended.run.rglob("*") if path.is_file()]
    before = {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in files}
    again = quickstart(ended.run)
    assert again == json.loads((ended.run / "summary.json").read_text("utf-8"))
    assert {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in files} == before


ROUND = [
    "--sft.steps", "2", "--sft.data.size", "64", "--eval.size", "8", "--learner.threads", "1",
    "--sft.model.init.hidden_size", "24", "--sft.model.init.num_hidden_layers", "1",
    "--sft.learner.warmup_updates", "0", "--best_of_n.learner.warmup_updates", "0",
    "--scoring.workers", "1", "--answers.data.size", "16", "--best_of_n.epochs", "1",
    "--best_of_n.batch.train_batch_size", "4", "--generate.answers.samples", "2",
    "--generate.answers.threshold", "-1", "--generate.answers.keep_truncated", "true",
    "--generate.answers.shard", "4",
]  # fmt: skip


def rejection_sampling(run: Path, *flags: str, overwrite: bool = False) -> dict[str, Any]:
    pipeline = load_pipeline(
        ROOT / "recipes" / "best_of_n", [*ROUND, "--run_dir", str(run), *flags]
    )
    return train_pipeline(pipeline, Console("quiet"), overwrite=overwrite)


def files_of(run: Path) -> dict[Path, tuple[int, bytes]]:
    files = [path for path in run.rglob("*") if path.is_file()]
    return {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in files}


@pytest.mark.slow
def test_a_stage_generates_the_rows_that_the_next_one_trains_on(tmp_path: Path) -> None:
    run = tmp_path / "run"
    summary = rejection_sampling(run)
    assert list(summary["stages"]) == ["sft", "answers", "best_of_n"]
    answers = summary["stages"]["answers"]
    assert answers["counts"]["samples"] == 2 * answers["counts"]["prompts"]
    rows = [json.loads(line) for line in (run / "answers" / "best.jsonl").open(encoding="utf-8")]
    assert len(rows) == answers["counts"]["rows"] == answers["counts"]["prompts"] > 12
    assert {row["generated"] for row in rows} == {answers["generated"]}
    about = json.loads((run / "answers" / "generate.json").read_text("utf-8"))
    assert about["model"] == str(run / "sft" / "model")
    trained = json.loads((run / "best_of_n" / "recipe.json").read_text("utf-8"))["recipe"]
    assert trained["data"]["path"] == str(run / "answers" / "best.jsonl")
    assert summary["stages"]["best_of_n"]["episodes"] == len(rows)

    before = files_of(run)  # it has ended: nothing is done again
    assert rejection_sampling(run) == summary
    assert files_of(run) == before

    lost = run / "answers" / "shards" / "00001.jsonl"  # as if killed while it sampled
    content = lost.read_bytes()
    for path in (lost, run / "answers" / "summary.json", run / "answers" / "best.jsonl"):
        path.unlink()
    again = rejection_sampling(run)["stages"]
    assert lost.read_bytes() == content
    assert again["answers"]["counts"] == answers["counts"]
    assert again["best_of_n"] == summary["stages"]["best_of_n"]

    with pytest.raises(UsageError, match="samples = 2, and now it is 3: choose another"):
        rejection_sampling(run, "--generate.answers.samples", "3")


@pytest.mark.slow
def test_a_stage_without_rows_ends_the_pipeline_and_can_be_sampled_anew(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"answers selected no row of \d+ samples"):
        rejection_sampling(tmp_path, "--generate.answers.threshold", "5")
    flags = ["--generate.answers.samples", "3"]
    answers = rejection_sampling(tmp_path, *flags, overwrite=True)["stages"]["answers"]
    assert answers["counts"]["samples"] == 3 * answers["counts"]["prompts"]
