"""Recipes that come with postgrad are named without a path."""

from pathlib import Path

import pytest

from postgrad.recipe import shipped
from postgrad.recipe.load import load_recipe
from postgrad.recipe.pipeline import load_pipeline

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("word", "file"),
    [
        ("quickstart", "quickstart"),
        ("recipes/quickstart", "quickstart"),
        ("7b/grpo", "7b/grpo.toml"),
        ("7b/grpo.toml", "7b/grpo.toml"),
        ("recipes/gsm8k_sft.toml", "gsm8k_sft.toml"),
        ("quickstart/sft", "quickstart/sft.toml"),
    ],
)
def test_a_name_means_a_shipped_recipe_in_any_folder(
    word: str, file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert shipped.located(word) == ROOT / "recipes" / file


@pytest.mark.parametrize("word", ["7b", "nothing", "/quickstart", "../recipes/quickstart"])
def test_what_is_no_recipe_stays_as_it_was_typed(
    word: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert shipped.located(word) == Path(word)


def test_a_file_in_the_folder_comes_before_a_shipped_recipe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("quickstart").mkdir()
    assert shipped.located("quickstart") == Path("quickstart")


def test_a_wheel_has_the_recipes_beside_the_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "recipes").mkdir()
    monkeypatch.setattr(shipped, "PACKAGE", tmp_path)
    assert shipped.shipped_folder() == tmp_path / "recipes"


def test_every_listed_recipe_loads_and_says_what_it_does() -> None:
    listed = shipped.shipped()
    assert {"quickstart", "gsm8k_grpo", "7b/grpo", "rlhf_tiny"} <= {name for name, _ in listed}
    assert not any(name.startswith("start") for name, _ in listed)
    for name, path in listed:
        assert shipped.located(name) == path
        assert len(shipped.summary_of(path)) > 20
        assert load_pipeline(path) if path.is_dir() else load_recipe(path)
