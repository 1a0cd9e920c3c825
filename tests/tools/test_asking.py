"""Models that read images answer to a pipeline's last questions, by plain transformers."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from helpers.image_directories import models, row
from helpers.image_models import KINDS
from postgrad.observe.console import Console
from postgrad.recipe.load import parse_recipe
from postgrad.recipe.pipeline import load_pipeline
from postgrad.recipe.recipe import Answering
from postgrad.tools.asking import ask
from postgrad.tools.evaluate import evaluate
from postgrad.tools.pipeline import train_pipeline

__all__ = ["models"]

BOTH = ((40, 16), (16, 24))
# Text between pictures, so that nothing of a picture is left for the question behind it.
ROWS = [
    {**row(1, "no"), "answer": "no"},
    {"messages": [{"role": "user", "content": "hi"}], "answer": "ho"},
    {**row(2, "yes", BOTH), "answer": "yes"},
]
ONE_IMAGE = [*ROWS[:2], {**row(2, "yes", BOTH[:1]), "answer": "yes"}]


def recipe_of(path: str, folder: Path, rows: list[dict[str, Any]]) -> Answering:
    """A recipe whose evaluation set is `rows`."""
    (folder / "held_out.jsonl").write_text("".join(f"{json.dumps(each)}\n" for each in rows))
    recipe = parse_recipe({
        "job": "rl", "run_dir": str(folder / "run"), "steps": 1,
        "model": {"path": path, "dtype": "float32"},
        "data": {"path": str(folder / "held_out.jsonl"), "messages": "messages", "max_len": 200},
        "eval": {
            "path": str(folder / "held_out.jsonl"), "n_samples": 1, "temperature": 1e-6,  # greedy
            "max_new_tokens": 6,
        },
        "rewards": [{"type": "exact_match"}], "algorithm": {"type": "grpo"},
        "batch": {"rollout_batch_size": 2, "n_samples_per_prompt": 2},
        "rollout": {"max_new_tokens": 6}, "scoring": {"workers": 1},
    })  # fmt: skip
    assert isinstance(recipe, Answering)
    return recipe


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_greedy_answers_are_those_that_our_engine_samples(
    kind: str, models: Callable[[str], str], tmp_path: Path
) -> None:
    path = models(kind)
    rows = ONE_IMAGE if kind == "llava_onevision" else ROWS
    recipe = recipe_of(path, tmp_path, rows)
    evaluate(recipe, path, Console("quiet"), to=tmp_path / "samples.jsonl")
    lines = (tmp_path / "samples.jsonl").read_text("utf-8").splitlines()
    sampled = {line["row"]: line["turns"][-1]["text"] for line in map(json.loads, lines)}
    answers = ask(path, recipe, 3)
    assert [answer.answer for answer in answers] == [sampled[n].strip() for n in range(3)]
    assert [answer.reference for answer in answers] == ["no", "ho", "yes"]
    assert "<image " in answers[0].question


@pytest.mark.slow
def test_a_pipeline_asks_what_it_trained(models: Callable[[str], str], tmp_path: Path) -> None:
    recipe = recipe_of(models("qwen2_5_vl"), tmp_path, ROWS).dump()
    trained = tmp_path / "trained.jsonl"
    trained.write_text("".join(f"{json.dumps(row(n, 'yes'))}\n" for n in (7, 8)))
    flags = {
        "steps": 1, "model.path": models("qwen2_5_vl"), "model.dtype": "float32",
        "data.path": trained, "data.messages": "messages", "data.max_len": 200,
        "eval.path": recipe["data"]["path"], "eval.max_new_tokens": 4, "learner.threads": 1,
    }  # fmt: skip
    (tmp_path / "sft.toml").write_text(
        'job = "sft"\nrun_dir = "x"\nrewards = [{ type = "exact_match" }]\n'
        "[batch]\ntrain_batch_size = 2\n[rollout]\nmax_new_tokens = 4\n"
    )
    (tmp_path / "pipeline.toml").write_text(
        f'recipes = ["sft.toml"]\nrun_dir = "{tmp_path / "run"}"\nask = 2\n'
    )
    words = [word for key, value in flags.items() for word in (f"--{key}", str(value))]
    summary = train_pipeline(load_pipeline(tmp_path, words), Console("quiet"))
    assert [answer["reference"] for answer in summary["answers"]] == ["no", "ho"]
