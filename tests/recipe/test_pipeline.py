"""Pipelines: recipes in order, each from an earlier one's model."""

from collections.abc import Callable
from pathlib import Path

import pytest

from postgrad.core.errors import UsageError
from postgrad.recipe.pipeline import load_pipeline, with_models
from postgrad.recipe.recipe import RLRecipe

Write = Callable[..., Path]
SFT = 'job = "sft"\nrun_dir = "x"\nsteps = 1\n[model]\npath = "m"\n[data]\npath = "rows.jsonl"\n'
FILE = 'recipes = ["sft.toml", "rl.toml"]\nrun_dir = "runs/p"\nask = 3\n'


@pytest.fixture
def folder(write: Write, tmp_path: Path) -> Path:
    write(text=SFT, name="sft.toml")
    write(("some/model", "@sft"), name="rl.toml")
    write(text=FILE, name="pipeline.toml")
    return tmp_path


def refused(folder: Path, *overrides: str) -> str:
    with pytest.raises(UsageError) as error:
        load_pipeline(folder, overrides)
    return str(error.value).replace(f"{folder}/", "")


def test_each_recipe_runs_in_a_folder_of_its_own(folder: Path) -> None:
    pipeline = load_pipeline(folder)
    assert [(stage.name, stage.recipe.run_dir) for stage in pipeline.stages] == [
        ("sft", "runs/p/sft"),
        ("rl", "runs/p/rl"),
    ]
    assert (pipeline.run_dir, pipeline.ask) == (Path("runs/p"), 3)


def test_flags_are_for_one_stage_for_all_or_for_the_pipeline(folder: Path) -> None:
    pipeline = load_pipeline(
        folder, ["--seed", "4", "--rl.learner.lr", "0.5", "--run_dir", "b", "--ask", "1"]
    )
    assert [stage.recipe.seed for stage in pipeline.stages] == [4, 4]
    assert [stage.recipe.learner.lr for stage in pipeline.stages] == [1e-6, 0.5]
    assert [stage.recipe.run_dir for stage in pipeline.stages] == ["b/sft", "b/rl"]
    assert pipeline.ask == 1


def test_a_stage_starts_from_the_model_of_an_earlier_one(folder: Path) -> None:
    recipe = with_models(load_pipeline(folder).stages[1].recipe, {"sft": "runs/p/sft/model"})
    assert isinstance(recipe, RLRecipe)
    assert recipe.model.path == "runs/p/sft/model"
    assert recipe.reference.model.path == "runs/p/sft/model"


def test_what_is_wrong_is_told_before_the_first_stage_runs(folder: Path, write: Write) -> None:
    assert "--rl.learner.lrr 1: unknown key 'learner.lrr'" in refused(
        folder, "--rl.learner.lrr", "1"
    )
    write(("some/model", "@stf"), name="rl.toml")
    assert refused(folder) == (
        "rl.toml: model.path = '@stf' names no earlier recipe; did you mean '@sft'?"
    )
    write(("[batch]", '[reference.model]\npath = "@rl"\n[batch]'), name="rl.toml")
    assert refused(folder) == (
        "rl.toml: reference.model.path = '@rl' names no earlier recipe; earlier ones: sft"
    )
    write(text=FILE.replace('"rl.toml"', '"lr.toml"'), name="pipeline.toml")
    assert "no recipe at lr.toml" in refused(folder)
    write(text=FILE.replace("run_dir", "rundir"), name="pipeline.toml")
    assert "pipeline.toml:2: unknown key 'rundir': did you mean 'run_dir'?" in refused(folder)
    write(text=FILE.replace("rl.toml", "a/sft.toml"), name="pipeline.toml")
    assert "two recipes have the same name" in refused(folder)


def test_a_folder_without_a_pipeline_is_told(tmp_path: Path) -> None:
    assert refused(tmp_path).endswith("is a folder without pipeline.toml")
    (tmp_path / "sft.toml").write_text("", "utf-8")
    (tmp_path / "notes.txt").write_text("", "utf-8")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "pipeline.toml").write_text("", "utf-8")
    told = "is a folder without pipeline.toml: name one of other, sft.toml"
    assert refused(tmp_path).endswith(told)
    assert "no recipe at pipeline.toml" in refused(tmp_path / "nowhere")
