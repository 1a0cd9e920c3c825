"""Rows of Python programs, and what the programs do with them."""

from typing import Any

import pytest

from translate.test_trl_program import lost, program

__all__ = ["program"]
FUNCTIONS = "def change(row): ...\ndef keep(row): ...\n"


def rows(program: Any, dataset: str, more: str = "") -> Any:
    return program(f"{FUNCTIONS}{more}\nSFTTrainer('m', train_dataset={dataset})")


@pytest.mark.parametrize(
    ("dataset", "wanted"),
    [
        ("load_dataset('d', 'main', split='train[:5%]')",
         {"path": "d", "name": "main", "split": "train[:5%]"}),
        ("load_dataset(path='d', name='main', revision='v')['test']",
         {"path": "d", "name": "main", "revision": "v", "split": "test"}),
        ("load_dataset('d', split=['a', 'b'])[1]", {"path": "d", "split": "b"}),
        ("load_dataset('json', data_files='a.jsonl', split='train')", {"path": "a.jsonl"}),
        ("load_dataset('json', data_files='a.jsonl', split='train[:9]')",
         {"path": "a.jsonl", "split": "train[:9]"}),
        ("load_dataset('csv', data_files={'train': 'a.csv', 'test': 'b.csv'})['test']",
         {"path": "b.csv"}),
        ("load_dataset('csv', data_files={'train': 'a.csv', 'test': 'b.csv'}, split='test')",
         {"path": "b.csv"}),
        ("load_dataset('csv', data_files={'train': 'a.csv'})", {"path": "a.csv"}),
        ("load_from_disk('folder')", {"path": "folder"}),
        ("Dataset.from_json('a.json')", {"path": "a.json"}),
        ("load_dataset('d').select(range(100))", {"path": "d", "limit": 100}),
        ("load_dataset('d').select(range(min(100, len(other))))", {"path": "d", "limit": 100}),
        ("load_dataset('d').take(7).remove_columns(['a']).with_format('torch')",
         {"path": "d", "limit": 7}),
        ("load_dataset('d').shuffle(seed=3)", {"path": "d"}),
        ("load_dataset('d').map(change).filter(keep)",
         {"path": "d", "map": "my_rows:change", "filter": "my_rows:keep"}),
        ("load_dataset('d').map(change).map(lambda row: row)",
         {"path": "d", "map": "my_rows:row"}),
        ("load_dataset('d').map(forms.chat, batched=True)", {"path": "d", "map": "forms:chat"}),
        ("load_dataset('d').rename_column('q', 'prompt')", {"path": "d", "map": "my_rows:row"}),
        ("standardize(load_dataset('d'))", {"path": "d", "map": "my_rows:row"}),
        ("[change(row) for row in load_dataset('d')]", {"path": "d", "map": "my_rows:change"}),
        ("load_dataset('d').train_test_split(test_size=0.1)['train']",
         {"path": "d", "eval_fraction": 0.1}),
    ],
)  # fmt: skip
def test_rows_have_the_keys_of_data(program: Any, dataset: str, wanted: dict[str, Any]) -> None:
    translation = rows(program, dataset)
    data = translation.recipe["data"]
    assert {key: data[key] for key in data if key not in ("max_len", "on_too_long")} == wanted
    assert translation.problem is None
    assert lost(translation) == {}


@pytest.mark.parametrize(
    ("dataset", "name"),
    [
        ("load_dataset('d').select(indices())", "load_dataset('d').select(indices())"),
        ("load_dataset('d').select(range(5, 9))", "load_dataset('d').select(range(5, 9))"),
        ("load_dataset('d').skip(3)", "load_dataset('d').skip(3)"),
        ("load_dataset('d').train_test_split(test_size=50)['train']",
         "load_dataset('d').train_test_split(test_size=50)"),
        ("load_dataset('d', split=chosen())", "split"),
        ("load_dataset('d')[chosen()]", "split"),
        ("load_dataset('d', data_files='x.json')", "data_files"),
        ("load_dataset('d', streaming=True)", "streaming"),
        ("load_dataset('d', data_dir='x')", "data_dir"),
    ],
)  # fmt: skip
def test_what_has_no_key_is_told_with_its_line(program: Any, dataset: str, name: str) -> None:
    translation = rows(program, dataset)
    assert lost(translation).keys() == {name}
    assert translation.recipe["data"]["path"] == "d"


def test_a_comment_says_what_has_to_be_written(program: Any) -> None:
    translation = rows(program, "load_dataset('d').filter(keep).select(range(9)).map(change)")
    comments = translation.draft.comments
    assert comments["data", "filter"].startswith("write it from line 4, load_dataset")
    assert "returns the whole row here" in comments["data", "map"]
    assert comments["data", "limit"] == "line 4: the first rows; there behind the filter"


def test_rows_that_the_program_makes_are_to_be_written_into_a_file(program: Any) -> None:
    for dataset in ("Dataset.from_list([{'a': 1}])", "Dataset.from_dict(d).map(change)"):
        translation = rows(program, dataset)
        assert "write them into a JSONL file" in lost(translation)["train_dataset"][1]
        assert translation.problem is not None
    unknown = rows(program, "build()")
    assert "where its rows are is not known" in lost(unknown)["train_dataset"][1]


def test_several_datasets_are_sets(program: Any) -> None:
    translation = rows(
        program, "concatenate_datasets([load_dataset('a').map(change), load_dataset('b')])"
    )
    assert translation.recipe["data"]["sets"] == [
        {"path": "a", "map": "my_rows:change"}, {"path": "b"},
    ]  # fmt: skip
    assert "line 4" in translation.draft.comments["data", "sets", 0, "map"]
    mixed = "interleave_datasets([load_dataset('a'), load_dataset('b')], probabilities=[0.7, 0.3])"
    assert lost(rows(program, mixed))["probabilities"][0] == [0.7, 0.3]


def evaluated(program: Any, train: str, held_out: str, config: str = "") -> Any:
    config = config or "eval_strategy='steps', eval_steps=5"
    return program(
        f"{FUNCTIONS}SFTTrainer('m', args=SFTConfig({config}), train_dataset={train}, "
        f"eval_dataset={held_out})"
    )


@pytest.mark.parametrize(
    ("train", "held_out", "wanted"),
    [
        ("load_dataset('d', split='train')", "load_dataset('d', split='test')", {"split": "test"}),
        ("load_dataset('d').map(change)", "load_dataset('d', 'x').map(change)",
         {"subset": "x", "split": "train"}),
        ("load_dataset('d')", "load_dataset('e')['test'].select(range(9))",
         {"path": "e", "split": "test", "limit": 9}),
        ("load_dataset('d')", "{'a': load_dataset('e'), 'b': load_dataset('f')}",
         {"sets": [{"name": "e", "path": "e"}, {"name": "f", "path": "f"}]}),
    ],
)  # fmt: skip
def test_rows_to_evaluate_on_are_those_of_the_trainer(
    program: Any, train: str, held_out: str, wanted: dict[str, Any]
) -> None:
    translation = evaluated(program, train, held_out)
    assert translation.problem is None
    evaluation = translation.recipe["eval"]
    assert evaluation.pop("every") == 5
    evaluation.pop("on_too_long")
    assert evaluation == wanted


def test_halves_of_a_dataset_are_a_fraction_to_evaluate_on(program: Any) -> None:
    halves = "load_dataset('d').train_test_split(test_size=0.1, seed=1)"
    translation = evaluated(program, f"{halves}['train']", f"{halves}['test']")
    assert translation.problem is None
    assert translation.recipe["data"]["eval_fraction"] == 0.1
    assert "split" not in translation.recipe["eval"]


def test_nothing_is_evaluated_where_the_rows_or_the_strategy_do_not_say(program: Any) -> None:
    off = evaluated(program, "load_dataset('d')", "load_dataset('e')", "eval_steps=5")
    assert "eval" not in off.recipe
    unknown = evaluated(program, "load_dataset('d')", "build()")
    assert "eval" not in unknown.recipe
    assert "eval_dataset" in lost(unknown)
