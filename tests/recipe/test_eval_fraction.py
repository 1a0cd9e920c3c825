"""data.eval_fraction in recipes: the evaluation set that it makes, and what contradicts it."""

from collections.abc import Callable
from pathlib import Path

import pytest

from postgrad.core.errors import UsageError
from postgrad.recipe.load import load_recipe, recipe_from_json

Write = Callable[..., Path]
SFT = """job = "sft"
run_dir = "runs/a"
steps = 10

[model]
path = "some/model"

[data]
path = "rows.jsonl"
name = "main"
messages = "chat"
eval_fraction = 0.1
"""
SETS = """
[[data.sets]]
path = "one/rows.jsonl"

[[data.sets]]
path = "two/rows.jsonl"

[[data.sets]]
path = "three.jsonl"
eval_fraction = 0.0
"""


def test_the_part_is_an_evaluation_set_with_the_keys_of_data(write: Write) -> None:
    recipe = load_recipe(write(text=SFT))
    (part,) = recipe.eval.sets
    assert (part.name, part.subset, part.path) == (None, "main", "rows.jsonl")
    data, trained = part.data.model_dump(), recipe.data.sources[0].model_dump()
    assert {key for key in data if data[key] != trained[key]} == {"shuffle"}
    assert recipe_from_json(recipe.dump()) == recipe


def test_other_keys_of_eval_are_those_of_the_part(write: Write) -> None:
    recipe = load_recipe(write(text=SFT + "[eval]\nevery = 5\nmax_len = 512\n"))
    (part,) = recipe.eval.sets
    assert (recipe.eval.every, part.max_len, part.eval_fraction) == (5, 512, 0.1)


def test_each_dataset_has_a_part_with_a_name(write: Write) -> None:
    recipe = load_recipe(write(text=SFT + SETS))
    assert [(part.name, part.path) for part in recipe.eval.sets] == [
        ("rows", "one/rows.jsonl"),
        ("rows-2", "two/rows.jsonl"),
    ]


@pytest.mark.parametrize("eval_lines", ['path = "held.jsonl"', 'split = "test"'])
def test_rows_of_its_own_in_eval_contradict_it(eval_lines: str, write: Write) -> None:
    with pytest.raises(UsageError, match=r"data.eval_fraction: holds out .* delete path, "):
        load_recipe(write(text=f"{SFT}[eval]\n{eval_lines}\n"))


def test_it_is_a_key_of_data_only(write: Write) -> None:
    text = SFT.replace("eval_fraction = 0.1\n", "")
    with pytest.raises(UsageError, match=r"eval_fraction: is a key of \[data\]"):
        load_recipe(write(text=f'{text}[eval]\npath = "held.jsonl"\neval_fraction = 0.1\n'))
