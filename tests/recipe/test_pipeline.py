"""Pipelines: recipes in order, each from an earlier one's model."""

from collections.abc import Callable
from pathlib import Path

import pytest

from postgrad.core.errors import UsageError
from postgrad.recipe.load import require_models
from postgrad.recipe.pipeline import load_pipeline, with_models, with_rows
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


def test_each_stage_has_a_mirror_of_its_own(folder: Path) -> None:
    message = refused(folder, "--checkpoint.mirror", "s3://bucket/p/")
    assert message.startswith(
        "rl.toml: checkpoint.mirror = 's3://bucket/p' is the mirror of sft too"
    )
    pipeline = load_pipeline(folder, ["--sft.checkpoint.mirror", "s3://bucket/p"])
    assert [stage.recipe.checkpoint.mirror for stage in pipeline.stages] == ["s3://bucket/p", ""]


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
        "rl.toml: model.path = '@stf' names no earlier recipe that trains a model; "
        "did you mean '@sft'?"
    )
    write(("[batch]", '[reference.model]\npath = "@rl"\n[batch]'), name="rl.toml")
    assert refused(folder) == (
        "rl.toml: reference.model.path = '@rl' names no earlier recipe that trains a model; "
        "earlier ones: sft"
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
    assert refused(tmp_path) == (
        f"{tmp_path} is a folder without pipeline.toml: give a recipe, such as other or sft.toml"
    )
    assert "no recipe at pipeline.toml" in refused(tmp_path / "nowhere")


def test_a_run_in_place_of_a_recipe_is_told_how_to_go_on(tmp_path: Path) -> None:
    (tmp_path / "recipe.json").write_text("{}", "utf-8")
    assert refused(tmp_path) == (
        f"{tmp_path} is a run, not a recipe: postgrad resume {tmp_path} continues it"
    )


ROWS = 'recipes = ["sft.toml", "rl.toml", "best.toml"]\nrun_dir = "runs/p"\n'
GENERATE = '[generate.rl]\nselect = "best"\nsamples = 4\n'


@pytest.fixture
def generating(folder: Path, write: Write) -> Path:
    """SFT, answers of its model, SFT on the best of them."""
    write(text=SFT.replace('"rows.jsonl"', '"@rl"'), name="best.toml")
    write(text=ROWS + GENERATE, name="pipeline.toml")
    return folder


def test_a_stage_trains_on_the_rows_that_an_earlier_one_generates(generating: Path) -> None:
    pipeline = load_pipeline(generating, ["--generate.rl.top", "2", "--run_dir", "b"])
    sft, rl, best = pipeline.stages
    assert (sft.generate, best.generate) == (None, None)
    assert rl.generate is not None
    assert (rl.generate.select, rl.generate.samples, rl.generate.top) == ("best", 4, 2)
    assert rl.rows == Path("b/rl/best.jsonl")
    assert with_rows(best.recipe, {}).data.path == "@rl"
    recipe = with_rows(best.recipe, {"rl": str(rl.rows)})
    assert recipe.data.path == "b/rl/best.jsonl"
    with pytest.raises(UsageError, match=r"data\.path = '@rl' are rows that an earlier recipe"):
        require_models(with_models(best.recipe, {}))


def test_rows_are_named_in_every_set(generating: Path, write: Write) -> None:
    sets = '[[data.sets]]\npath = "@rl"\n[[data.sets]]\npath = "more.jsonl"\n'
    text = SFT.replace('[data]\npath = "rows.jsonl"\n', sets) + '[eval]\npath = "@rl"\nevery = 1\n'
    write(text=text, name="best.toml")
    recipe = with_rows(load_pipeline(generating).stages[2].recipe, {"rl": "x.jsonl"})
    assert [source.path for source in recipe.data.sources] == ["x.jsonl", "more.jsonl"]
    assert [held_out.data.path for held_out in recipe.eval.sets] == ["x.jsonl"]


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            "[generate.rl]",
            "[generate.bset]",
            "[generate.bset] names no recipe; did you mean 'best'?",
        ),
        ("[generate.rl]", "[generate.best]", "the last recipe, best, only generates"),
        ('"best"\n', '"above"\n', 'select = "above" needs threshold'),
        ('"best"\n', '"bets"\n', "'best'"),
        ("samples = 4", "pass_rate = [0.9, 0.1]", "the lower one first"),
        ("samples = 4", "samples = 0", "samples"),
    ],
)
def test_a_wrong_generation_is_told_before_anything_runs(
    old: str, new: str, message: str, generating: Path, write: Write
) -> None:
    write(text=(ROWS + GENERATE).replace(old, new), name="pipeline.toml")
    assert message in refused(generating)


def test_models_and_rows_are_not_taken_for_each_other(generating: Path, write: Write) -> None:
    write(text=SFT.replace('"rows.jsonl"', '"@sft"'), name="best.toml")
    assert refused(generating) == (
        "best.toml: data.path = '@sft' names no earlier recipe that generates rows; "
        "earlier ones: rl"
    )
    write(text=SFT.replace('"m"', '"@rl"'), name="best.toml")
    assert "model.path = '@rl' names no earlier recipe that trains a model" in refused(generating)
    write(text=ROWS.replace("best.toml", "generate.toml"), name="pipeline.toml")
    assert "a recipe cannot be called generate" in refused(generating)
