"""Whole runs with a teacher: what it changes, what a checkpoint says of it, and what is refused."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from helpers.fake_ranks import FakeGroup, fake_ranks
from helpers.runs import lines, tensors
from helpers.tiny_runs import MODEL, MakeRecipe
from postgrad.core.errors import RunError, UsageError
from postgrad.fleet.local import frozen_hash
from postgrad.models.fresh import make_fresh
from postgrad.models.settings import ModelInit
from postgrad.observe.console import Console
from postgrad.recipe.recipe import Recipe
from postgrad.training.start import train

__all__ = ["fake_ranks"]

Models = Callable[[int], str]
GRADED = {"algorithm": {"type": "on_policy_distillation"}, "sentinels": {"truncation": "off"}}
COMPARED = {
    "algorithm": {"type": "distillation", "divergence": "jsd", "beta": 0.3, "nll_coef": 0.5},
    "checkpoint": {"save_steps": 1, "max_ckpt_num": 2},
}
NO_EVAL = {"every": 0, "at_start": False, "at_end": False}
OF_JOB: dict[str, dict[str, Any]] = {"rl": GRADED, "sft": COMPARED}


@pytest.fixture
def make_taught(make_recipe: MakeRecipe, models: Models) -> MakeRecipe:
    """make_taught("rl", "run", teacher=path, **changes): a student that learns from a teacher."""

    def make(job: str, run: str, teacher: str = "", **changes: Any) -> Recipe:
        return make_recipe(
            job,
            run,
            **{
                "model": {"path": models(1), "init": None},
                "teacher": {"model": {"path": teacher or models(2)}},
                **OF_JOB[job],
                **changes,
            },
        )

    return make


def logged(recipe: Recipe) -> list[dict[str, Any]]:
    return lines(Path(recipe.run_dir) / "metrics.jsonl")


@pytest.mark.parametrize("job", ["rl", "sft"])
def test_a_teacher_like_the_student_leaves_it_as_it_is(
    job: str, make_taught: MakeRecipe, models: Models, console: Console
) -> None:
    algorithm = {"type": OF_JOB[job]["algorithm"]["type"]}
    recipe = make_taught(job, "run", models(1), steps=1, algorithm=algorithm, eval=NO_EVAL)
    train(recipe, console)
    step = logged(recipe)[0]
    if job == "rl":
        assert step["teacher/reverse_kl"] == 0.0
        assert step["policy/skipped_samples"] == step["samples"] > 0
    else:
        assert step["policy/divergence"] == pytest.approx(0.0, abs=1e-6)
        assert step["policy/grad_norm"] == pytest.approx(0.0, abs=1e-5)
        return  # rounding is a gradient too, and Adam scales it
    before = load_file(Path(models(1)) / "model.safetensors")
    after = tensors(recipe.run_dir, 1)
    assert before.keys() <= {name.rpartition("/")[2] for name in after}
    for name, weight in before.items():
        (same,) = (after[key] for key in after if "weights" in key and key.endswith(f"/{name}"))
        assert same.equal(weight.float()), name


@pytest.mark.slow
@pytest.mark.parametrize(
    ("job", "metric"), [("rl", "teacher/reverse_kl"), ("sft", "policy/divergence")]
)
def test_a_student_comes_nearer_to_its_teacher(
    job: str, metric: str, make_taught: MakeRecipe, console: Console
) -> None:
    algorithm = {"type": OF_JOB[job]["algorithm"]["type"]}
    recipe = make_taught(job, "run", steps=12, algorithm=algorithm)
    train(recipe, console)
    values = [step[metric] for step in logged(recipe)]
    assert sum(values[-3:]) < 0.8 * sum(values[:3])


@pytest.mark.slow
@pytest.mark.parametrize("job", ["rl", "sft"])
def test_a_resumed_run_has_the_bits_of_one_that_went_through_with_the_same_teacher_alone(
    job: str, make_taught: MakeRecipe, models: Models, console: Console, tmp_path: Path
) -> None:
    teacher = str(tmp_path / "teacher")
    shutil.copytree(models(2), teacher)
    whole, halves = make_taught(job, "whole", teacher), make_taught(job, "halves", teacher, steps=1)
    train(whole, console)
    train(halves, console)
    saved = Path(halves.run_dir) / "checkpoints"
    state = next(saved.glob("*1/state.json"))
    assert json.loads(state.read_text())["choices"]["frozen"]["teacher"] == frozen_hash(teacher)
    train(make_taught(job, "halves", teacher), console)
    one, two = tensors(whole.run_dir, 3), tensors(halves.run_dir, 3)
    assert all(one[name].equal(two[name]) for name in one)
    shutil.copy(Path(models(1)) / "model.safetensors", teacher)
    with pytest.raises((RunError, UsageError), match="teacher"):
        train(make_taught(job, "halves", teacher, steps=4), console)


@pytest.mark.parametrize("job", ["rl", "sft"])
def test_on_a_group_of_one_rank_a_run_has_the_bits_of_this_process(
    job: str, make_taught: MakeRecipe, console: Console, fake_ranks: list[FakeGroup]
) -> None:
    few = {"steps": 2, "eval": NO_EVAL, "checkpoint": {"save_steps": 1}}
    here = make_taught(job, "here", **few)
    there = make_taught(job, "there", cluster={"type": "ray"}, **few)
    train(here, console)
    train(there, console)
    assert len(fake_ranks) == 1
    one, two = (tensors(recipe.run_dir, 2) for recipe in (here, there))
    assert all(one[name].equal(two[name]) for name in one)


@pytest.mark.parametrize("job", ["rl", "sft"])
def test_a_teacher_with_other_tokens_is_refused_by_name(
    job: str, make_taught: MakeRecipe, console: Console, tmp_path: Path
) -> None:
    init = {**MODEL["init"], "tokenizer": {"kind": "characters", "phrases": ["a phrase "]}}
    other = tmp_path / "other"
    make_fresh(ModelInit.model_validate(init), [], 0, other)
    told = r"teacher\.model\.path: .*other has another tokenizer .*postgrad generate"
    with pytest.raises(UsageError, match=told):
        train(make_taught(job, "run", str(other)), console)


def test_a_teacher_that_is_missing_or_not_read_is_an_error_of_the_recipe(
    make_recipe: MakeRecipe,
) -> None:
    for job, taught in OF_JOB.items():
        with pytest.raises(UsageError, match=r"teacher\.model\.path: .*give its directory"):
            make_recipe(job, **taught)
        with pytest.raises(UsageError, match=r"teacher: this algorithm asks no teacher"):
            make_recipe(job, teacher={"model": {"path": "somewhere"}})
