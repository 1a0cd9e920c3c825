"""A changed recipe file: its comments stay, its values are the wanted ones."""

import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

from postgrad.core.errors import UsageError
from postgrad.recipe.load import load_recipe, write_changed

Write = Callable[..., Path]


def test_a_changed_file_loads_as_the_flags_do_and_keeps_its_comments(
    write: Write, tmp_path: Path
) -> None:
    path = write(
        ("steps = 10", "steps = 10   # a short run"), ("[eval]", "# what is measured\n[eval]")
    )
    flags = ("--batch.micro_train_tokens", "4096", "--model.lora.rank", "8", "--epochs", "2")
    to = tmp_path / "fit.toml"
    write_changed(path, flags, to)
    assert load_recipe(to) == load_recipe(path, flags)
    text = to.read_text("utf-8")
    assert "# what is measured" in text
    assert tomllib.loads(text)["batch"] == {
        "rollout_batch_size": 16, "n_samples_per_prompt": 8, "micro_train_tokens": 4096,
    }  # fmt: skip
    assert "steps" not in tomllib.loads(text)  # epochs say how long now


def test_weights_that_a_flag_names_take_the_place_of_fresh_ones(tmp_path: Path) -> None:
    path, to = Path(__file__).parents[2] / "recipes/start/sft/recipe.toml", tmp_path / "fit.toml"
    write_changed(path, ("--model.path", "Qwen/Qwen3-8B"), to)
    assert tomllib.loads(to.read_text("utf-8"))["model"] == {"path": "Qwen/Qwen3-8B"}


def test_list_entries_are_changed_in_their_place(write: Write, tmp_path: Path) -> None:
    to = tmp_path / "fit.toml"
    write_changed(write(), ("--rewards.0.weight", "0.5"), to)
    assert load_recipe(to).rewards[0].weight == 0.5


def test_nothing_is_written_over_and_nothing_wrong_is_written(write: Write, tmp_path: Path) -> None:
    path, to = write(), tmp_path / "fit.toml"
    with pytest.raises(UsageError, match=r"--data\.max_lem"):
        write_changed(path, ("--data.max_lem", "12"), to)
    assert not to.exists()
    with pytest.raises(UsageError, match="already exists"):
        write_changed(path, (), path)
