"""A mistake in the rows of an evaluation is told with the evaluation's keys."""

import json
from pathlib import Path
from typing import Any

import pytest

from helpers.comparing import recipe_of
from postgrad.core.errors import UsageError
from postgrad.evaluation.keys import counted_under
from postgrad.models.tokenizer import load_tokenizer
from postgrad.recipe.load import parse_recipe
from postgrad.training.pinned import require_same_sources
from postgrad.training.rows import evaluated, held_out


def sft(data: dict[str, Any], evaluation: dict[str, Any]) -> Any:
    return parse_recipe(
        {
            "job": "sft",
            "run_dir": "run",
            "steps": 1,
            "model": {"path": "model"},
            "data": data,
            "eval": evaluation,
        }
    )


@pytest.fixture
def chats(tmp_path: Path) -> str:
    turns = [{"role": "user", "content": "a?"}, {"role": "assistant", "content": "a"}]
    path = tmp_path / "chats.jsonl"
    path.write_text(json.dumps({"chat": turns}), "utf-8")
    return str(path)


@pytest.mark.parametrize(
    ("evaluation", "message"),
    [
        ({"path": "missing.jsonl"}, r"missing\.jsonl: no such file or folder \(eval\.path\)"),
        ({"messages": "talk"}, r"no column 'talk' \(eval\.messages\)"),
        ({"filter": "nowhere_to_be:seen"}, r"^eval\.filter 'nowhere_to_be:seen'"),
        ({"split": "train[5:]"}, r"^eval\.split 'train\[5:\]'"),
        ({"sets": [{"name": "a", "split": "train[5:]"}]}, r"^eval\.sets\.0\.split 'train\[5:\]'"),
        ({"every": 1, "max_len": 2}, r"raise eval\.max_len, or cut rows with eval\.on_too_long"),
    ],
)
def test_the_evaluations_own_keys_are_named(
    evaluation: dict[str, Any], message: str, models: Any, chats: str
) -> None:
    recipe = sft({"path": chats, "messages": "chat"}, evaluation)
    with pytest.raises(UsageError, match=message):
        evaluated(recipe, 0, load_tokenizer(models(0)))


def test_keys_that_the_evaluation_takes_over_are_named_as_those_of_the_data(
    models: Any, chats: str
) -> None:
    recipe = sft({"path": chats, "messages": "talk"}, {"split": "train[:1]"})
    for read in (held_out, lambda recipe: evaluated(recipe, 0, load_tokenizer(models(0)))):
        with pytest.raises(UsageError, match=r"no column 'talk' \(data\.messages\)"):
            read(recipe)
    halves = sft({"path": chats, "eval_fraction": 0.5, "filter": "nowhere:seen"}, {"every": 1})
    with pytest.raises(UsageError, match=r"^data\.filter 'nowhere:seen'"):
        evaluated(halves, 0, load_tokenizer(models(0)))


def test_a_part_of_one_of_several_sets_is_told_with_that_sets_keys(models: Any, chats: str) -> None:
    """Keys that the set takes over from [data] stay those of [data]."""
    sets = [{"eval_fraction": 0.5}, {"eval_fraction": 0.5, "filter": "nowhere:seen"}]
    recipe = sft({"path": chats, "messages": "talk", "sets": sets}, {"every": 1})
    tokenizer = load_tokenizer(models(0))
    with pytest.raises(UsageError, match=r"no column 'talk' \(data\.messages\)"):
        evaluated(recipe, 0, tokenizer)
    with pytest.raises(UsageError, match=r"^data\.sets\.1\.filter 'nowhere:seen'"):
        evaluated(recipe, 1, tokenizer)


def test_a_value_of_by_that_is_no_name_is_shown() -> None:
    assert counted_under("kind", {"kind": 3}, 0, "rows.jsonl") == "3"
    assert counted_under(None, {}, 0, "rows.jsonl") == "rows.jsonl"
    with pytest.raises(UsageError, match=r"row 2 of rows\.jsonl has None there, and text or"):
        counted_under("kind", {"kind": None}, 2, "rows.jsonl")
    with pytest.raises(UsageError, match=r"has nothing there, .* it has level"):
        counted_under("kind", {"level": 1}, 2, "rows.jsonl")


def test_questions_and_hashes_of_the_evaluation_are_read_with_its_keys(
    tmp_path: Path, models: Any, chats: str
) -> None:
    with pytest.raises(UsageError, match=r"\(eval\.path\)"):
        held_out(sft({"path": chats, "messages": "chat"}, {"path": "missing.jsonl"}))
    folder = sft({"path": chats}, {"path": str(tmp_path), "subset": "de"})
    require_same_sources(folder, {})
    with pytest.raises(UsageError, match=r"no folder 'de' \(eval\.subset\)"):
        evaluated(folder, 0, load_tokenizer(models(0)))
    pairs = recipe_of("missing.jsonl")
    with pytest.raises(UsageError, match=r"\(eval\.path\)"):
        evaluated(pairs, 0, load_tokenizer(models(0)))
