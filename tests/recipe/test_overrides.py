"""Flags: how words become values, and where they reach in a recipe that states everything."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers.placed import RL
from postgrad.core.errors import UsageError
from postgrad.recipe.lines import KeyPath
from postgrad.recipe.load import load_recipe, parse_recipe, with_overrides
from postgrad.recipe.overrides import Override, apply_overrides, parse_overrides

Write = Callable[..., Path]


def parsed(*words: str) -> list[tuple[KeyPath, Any]]:
    return [(override.place, override.value) for override in parse_overrides(words)]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-4", 1e-4),
        ("3", 3),
        ("-1", -1),
        ("true", True),
        ("True", "True"),
        ("[1, 4]", [1, 4]),
        ("{ min_len = 3 }", {"min_len": 3}),
        ('"3"', "3"),
        ("train[:-5]", "train[:-5]"),
        ("a b", "a b"),
        ("", ""),
        ("1\nseed = 2", "1\nseed = 2"),
    ],
)
def test_a_value_is_read_as_toml_and_is_text_otherwise(text: str, value: Any) -> None:
    for words in (["--a.b", text], [f"--a.b={text}"]):
        assert parsed(*words) == [(("a", "b"), value)]


def test_numbers_in_a_key_count_entries_of_lists() -> None:
    assert parsed("--rewards.1.weight=2") == [(("rewards", 1, "weight"), 2)]
    assert parsed("--learner.²=2") == [(("learner", "²"), 2)]  # a digit to Unicode, no number


def test_a_first_entry_begins_a_list_that_was_left_out() -> None:
    flags = parse_overrides(["--rewards.0.type=math", "--learner.betas.0=0.8"])
    assert apply_overrides({"rewards": None}, flags) == {
        "rewards": [{"type": "math"}],
        "learner": {"betas": [0.8]},
    }
    with pytest.raises(UsageError, match=r"--rewards\.1\.type math: rewards is a list of 0"):
        apply_overrides({}, parse_overrides(["--rewards.1.type", "math"]))


def test_the_last_of_two_flags_for_one_key_wins_and_the_file_is_left_alone() -> None:
    raw = {"learner": {"lr": 1.0}, "rewards": [{"weight": 1.0}]}
    flags = parse_overrides(["--learner.lr=2.0", "--rewards.0.weight=5.0", "--learner.lr=3.0"])
    assert apply_overrides(raw, flags) == {"learner": {"lr": 3.0}, "rewards": [{"weight": 5.0}]}
    assert raw == {"learner": {"lr": 1.0}, "rewards": [{"weight": 1.0}]}


@pytest.mark.parametrize(
    ("before", "flag", "after"),
    [
        ({"steps": 5}, "--total_episodes=9", {"total_episodes": 9}),
        (
            {"batch": {"num_mini_batches": 2, "rollout_batch_size": 8}},
            "--batch.local_mini_batch_size=4",
            {"batch": {"local_mini_batch_size": 4, "rollout_batch_size": 8}},
        ),
        (
            {"batch": {"micro_train_batch_size": 2}},
            "--batch.micro_train_tokens=512",
            {"batch": {"micro_train_tokens": 512}},
        ),
    ],
)
def test_a_flag_takes_the_place_of_the_files_other_way_to_say_it(
    before: dict[str, Any], flag: str, after: dict[str, Any]
) -> None:
    assert apply_overrides(before, parse_overrides([flag])) == after


def test_two_flags_for_one_quantity_are_both_kept_for_the_check_to_refuse() -> None:
    flags = parse_overrides(["--steps=5", "--epochs=2"])
    assert apply_overrides({"total_episodes": 9}, flags) == {"steps": 5, "epochs": 2}


@given(st.lists(st.text("abc", min_size=1), min_size=1, max_size=4), st.integers() | st.booleans())
def test_what_a_flag_sets_is_found_at_its_key(parts: list[str], value: int) -> None:
    node: Any = apply_overrides({}, [Override(tuple(parts), value, "--flag")])
    for part in parts:
        node = node[part]
    assert node == value


def test_a_flag_for_evaluation_reaches_the_set_of_a_resolved_recipe(write: Write) -> None:
    changed = with_overrides(load_recipe(write()), ["--eval.split", "dev", "--eval.limit", "3"])
    assert [(eval_set.path, eval_set.split, eval_set.limit) for eval_set in changed.eval.sets] == [
        ("rows.jsonl", "dev", 3)
    ]
    assert load_recipe(write()).eval.sets[0].split == "test"


def test_a_flag_for_all_sets_of_a_resolved_recipe_reaches_each(write: Write) -> None:
    sets = '[eval]\n[[eval.sets]]\nname = "a"\nlimit = 1\n[[eval.sets]]\nname = "b"'
    mixed = '[data]\n[[data.sets]]\npath = "a.jsonl"\n[[data.sets]]\npath = "b.jsonl"'
    path = write(
        ('[eval]\nsplit = "test"\nevery = 5', sets.replace("name", 'path = "e"\nname')),
        ('[data]\npath = "rows.jsonl"', mixed),
    )
    flags = ["--eval.limit", "7", "--eval.sets.1.split", "dev", "--data.max_len", "600"]
    changed = with_overrides(load_recipe(path), flags)
    assert [(eval_set.limit, eval_set.split) for eval_set in changed.eval.sets] == [
        (7, "train"),
        (7, "dev"),
    ]
    assert [changed.data.max_len, *(data_set.max_len for data_set in changed.data.sets)] == [
        600
    ] * 3
    with pytest.raises(UsageError, match=r"--eval\.limit 0: eval\.sets\.1\.limit = 0"):
        with_overrides(load_recipe(path), ["--eval.limit", "0"])


def test_a_resolved_recipe_without_evaluation_is_given_one_by_flags(write: Write) -> None:
    without = load_recipe(write(('[eval]\nsplit = "test"\nevery = 5\n', "")))
    assert without.eval.sets == ()
    changed = with_overrides(without, ["--eval.split", "test", "--eval.every", "2"])
    assert [(eval_set.path, eval_set.split) for eval_set in changed.eval.sets] == [
        ("rows.jsonl", "test")
    ]
    with pytest.raises(UsageError, match=r"--eval\.limit 0: eval\.limit = 0"):
        with_overrides(without, ["--eval.limit", "0"])


@pytest.mark.parametrize("words", [["--run_dir", ""], ["--run_dir="]])
def test_a_flag_with_an_empty_value_is_told_with_its_quotes(words: list[str], write: Write) -> None:
    with pytest.raises(UsageError) as refused:
        load_recipe(write(), words)
    problem = "run_dir = '': string should have at least 1 character"
    assert str(refused.value) == f"--run_dir '': {problem}"


@pytest.mark.parametrize("key", ["run_dir", "data.path", "model.path"])
def test_white_space_alone_is_no_path(key: str, write: Write) -> None:
    with pytest.raises(UsageError) as refused:
        load_recipe(write(), [f"--{key}", "  "])
    message = f"--{key} '  ': {key} = '  ': a path is expected, not white space alone"
    assert str(refused.value) == message


@pytest.mark.parametrize("key", ["run_dir", "checkpoint.ckpt_path"])
def test_a_tilde_is_no_folder_where_a_run_is_written(key: str, write: Write) -> None:
    """It would make one of that name, whose removal is dangerous to type."""
    with pytest.raises(UsageError) as refused:
        load_recipe(write(), [f"--{key}", "~/runs/x"])
    assert str(refused.value).endswith("~ is no folder here: write the whole path")


def test_a_table_that_a_recipe_leaves_out_can_be_given_key_by_key() -> None:
    """A recipe that was loaded has null in its place."""
    before = parse_recipe({**RL, "cluster": {"type": "ray"}})
    assert before.cluster.rollout is None
    after = with_overrides(before, ["--cluster.rollout.workers", "2"])
    assert after.cluster.rollout is not None
    assert after.cluster.rollout.workers == 2
