"""Rows of files and folders, in order, with the place of whatever is wrong."""

import csv
import datetime
import decimal
import gzip
import json
import shutil
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from postgrad.core.errors import UsageError
from postgrad.data.files import files_of, read_file
from postgrad.data.rows import dataset_name, parse_split, read_rows, unread_keys
from postgrad.data.settings import DataSettings, MixSettings
from postgrad.recipe.eval_settings import EvalSettings

ROWS = [{"question": f"{i}?", "answer": str(i)} for i in range(10)]
WriteRows = Callable[..., str]


def read(path: str | Path, **keys: Any) -> list[tuple[int, str]]:
    rows = list(read_rows(DataSettings(path=str(path), **keys)))
    return [(row.index, row.values["answer"]) for row in rows]


TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"))
ALL = [(i, str(i)) for i in range(10)]


def test_json_lines_zipped_or_not_and_parquet_give_the_same_rows(
    tmp_path: Path, write_rows: WriteRows
) -> None:
    text = "\n\n".join(json.dumps(row) for row in ROWS)  # empty lines are no rows
    with gzip.open(tmp_path / "rows.jsonl.gz", "wt", encoding="utf-8") as file:
        file.write(text)
    pq.write_table(pa.Table.from_pylist(ROWS), tmp_path / "rows.parquet")
    assert read(write_rows(ROWS)) == ALL
    assert read(tmp_path / "rows.jsonl.gz") == ALL
    assert read(tmp_path / "rows.parquet") == ALL


@pytest.mark.parametrize("new", [pa.ipc.new_stream, pa.ipc.new_file])
def test_arrow_files_are_read_with_or_without_an_index(new: Any, tmp_path: Path) -> None:
    table = pa.Table.from_pylist([{**row, "sound": b"RIFF"} for row in ROWS])
    with new(tmp_path / "rows.arrow", table.schema) as file:
        file.write_table(table, max_chunksize=3)
    assert read(tmp_path / "rows.arrow") == ALL
    assert "sound" not in next(read_rows(DataSettings(path=str(tmp_path / "rows.arrow")))).values


def test_folders_that_datasets_has_saved_are_read_by_split_without_their_caches(
    tmp_path: Path,
) -> None:
    dataset = datasets.Dataset.from_list(ROWS)
    dataset.save_to_disk(tmp_path / "whole", num_shards=3)
    datasets.load_from_disk(tmp_path / "whole").map(lambda row: {"answer": "of a map"})
    assert list((tmp_path / "whole").glob("cache-*.arrow"))
    assert read(tmp_path / "whole") == ALL
    parts: dict[str | datasets.NamedSplit, datasets.Dataset]
    parts = {"train": dataset.select([5, 3, 1]), "test": dataset.select([0])}
    datasets.DatasetDict(parts.items()).save_to_disk(tmp_path / "parts")
    assert [answer for _, answer in read(tmp_path / "parts")] == ["5", "3", "1"]
    assert [answer for _, answer in read(tmp_path / "parts", split="test")] == ["0"]


@pytest.mark.parametrize(
    ("state", "why"),
    [
        ("{}", r"state.json: does not list the data files as Dataset.save_to_disk writes it"),
        ('{"_data_files": [{"filename": "../x.arrow"}]}', r"lists '../x.arrow', which is not in"),
        ('{"_data_files": [{"filename": null}]}', r"lists None, which is not in the folder"),
    ],
)
def test_a_saved_folder_without_its_files_is_refused(state: str, why: str, tmp_path: Path) -> None:
    datasets.Dataset.from_list(ROWS).save_to_disk(tmp_path / "whole")
    shutil.copy(tmp_path / "whole" / "data-00000-of-00001.arrow", tmp_path / "x.arrow")
    (tmp_path / "whole" / "state.json").write_text(state)
    with pytest.raises(UsageError, match=why):
        read(tmp_path / "whole")


def test_a_folder_laid_out_as_on_the_hub_is_read_by_configuration_and_split(tmp_path: Path) -> None:
    (tmp_path / "main").mkdir()
    (tmp_path / "socratic").mkdir()
    table = pa.Table.from_pylist
    pq.write_table(table(ROWS[:6]), tmp_path / "main" / "train-00000-of-00002.parquet")
    pq.write_table(table(ROWS[6:]), tmp_path / "main" / "train-00001-of-00002.parquet")
    pq.write_table(table(ROWS[:2]), tmp_path / "main" / "test-00000-of-00001.parquet")
    assert read(tmp_path, name="main") == ALL
    assert read(tmp_path, name="main", split="test") == ALL[:2]
    with pytest.raises(UsageError, match=r"no folder 'Main' .*\['main', 'socratic'\]"):
        read(tmp_path, name="Main")
    with pytest.raises(UsageError, match="no data file of split 'validation'"):
        read(tmp_path, name="main", split="validation")


@pytest.mark.parametrize(
    ("names", "split", "wanted"),
    [
        (["math_train.jsonl", "math_test.jsonl"], "train", ["math_train.jsonl"]),
        (["math_train.jsonl", "math_test.jsonl"], "test", ["math_test.jsonl"]),
        (["rows-training.jsonl", "val.jsonl"], "train", ["rows-training.jsonl"]),
        (["rows-training.jsonl", "val.jsonl"], "validation", ["val.jsonl"]),
        (["a_eval_train.jsonl", "a_eval_test.jsonl"], "test", ["a_eval_test.jsonl"]),
        (["Train.jsonl", "eval.jsonl"], "eval", ["eval.jsonl"]),
        (["trainers.jsonl", "devices.jsonl"], "train", ["devices.jsonl", "trainers.jsonl"]),
        (["rows.jsonl", "eval.jsonl"], "train", None),
    ],
)
def test_files_of_a_folder_that_name_another_split_are_not_trained_on(
    names: list[str], split: str, wanted: list[str] | None, tmp_path: Path
) -> None:
    for name in names:
        (tmp_path / name).write_text('{"a": 1}', "utf-8")
    if wanted is None:
        with pytest.raises(UsageError, match=rf"no data file of split '{split}'"):
            files_of(tmp_path, None, split)
    else:
        assert [path.name for path in files_of(tmp_path, None, split)] == wanted


@pytest.mark.parametrize(
    ("split", "wanted"),
    [
        ("train[:3]", ALL[:3]),
        ("train[-2:]", ALL[-2:]),
        ("train[:-8]", ALL[:-8]),
        ("train[80%:]", ALL[8:]),
        ("train[10%:30%]", ALL[1:3]),
        ("train[-20%:]", ALL[-2:]),
        ("train[:-20%]", ALL[:-2]),
        ("train[:-1%]", ALL),  # 1% of 10 rows is none
        ("train[-300%:20%]", ALL[:2]),
    ],
)
def test_a_slice_keeps_the_numbers_of_its_rows(
    split: str, wanted: list[Any], write_rows: WriteRows
) -> None:
    assert read(write_rows(ROWS), split=split) == wanted


@pytest.mark.parametrize("start", ["", "0", "3", "12", "-4", "-40", "20%", "-20%"])
@pytest.mark.parametrize("stop", ["", "0", "3", "12", "-4", "-40", "50%", "-50%"])
def test_every_slice_has_the_rows_of_a_list(start: str, stop: str, write_rows: WriteRows) -> None:
    def bound(text: str) -> int | None:
        if not text.endswith("%"):
            return int(text) if text else None
        return {"20%": 2, "-20%": 8, "50%": 5, "-50%": 5}[text]

    path, split = write_rows(ROWS), f"train[{start}:{stop}]"
    if wanted := ALL[bound(start) : bound(stop)]:
        assert read(path, split=split) == wanted
        return
    with pytest.raises(UsageError, match="leaves no row of 10"):
        read(path, split=split)


def test_rows_are_read_one_at_a_time(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"answer": "0"}\n{"answer": "1"}\nbroken\n', "utf-8")
    rows = read_rows(DataSettings(path=str(path), split="train[:-1]"))
    assert next(rows).values == {"answer": "0"}  # once there is another, which is held back
    with pytest.raises(UsageError, match=r"rows.jsonl:3: not JSON"):
        next(rows)


def test_nothing_is_read_behind_the_last_row_of_a_slice(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"answer": "0"}\n{"answer": "1"}\nbroken\n', "utf-8")
    assert read(path, split="train[:2]") == ALL[:2]
    assert read(path, split="train[1:2]") == ALL[1:2]
    for split in ("train[:3]", "train[1:]", "train[:0]"):  # [:0] says of how many rows it has none
        with pytest.raises(UsageError, match=r"rows.jsonl:3: not JSON"):
            read(path, split=split)


def test_a_limit_takes_the_first_rows_of_a_slice(write_rows: WriteRows) -> None:
    assert read(write_rows(ROWS), split="train[2:]", limit=2) == ALL[2:4]


def test_a_split_that_is_none_is_refused() -> None:
    assert parse_split("test[90%:]") == ("test", "90%", None)
    with pytest.raises(UsageError, match="a split is a name"):
        parse_split("train[1,2]")


def test_a_broken_line_is_named_with_its_number(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"answer": "1"}\n{"answer": \n', "utf-8")
    with pytest.raises(UsageError, match=rf"{path}:2: not JSON: .*repair or remove the line"):
        read(path)
    path.write_text('{"answer": "1"}\n{"answer": "a\0b"}\n', "utf-8")
    with pytest.raises(
        UsageError, match=rf"{path}:2: not JSON: Invalid control character at \(character 14\); "
    ):
        read(path)
    path.write_text('[\n{"answer": "1"}\n]\n', "utf-8")
    with pytest.raises(
        UsageError, match=rf"{path}:1: not JSON: .*; a file that is a list of rows ends in .json$"
    ):
        read(path)
    path.write_text('{"answer": "1"}\n[1, 2]\n', "utf-8")
    with pytest.raises(UsageError, match=rf"{path}:2: a row is a JSON object, this is list"):
        read(path)
    path.write_bytes(b'{"answer": "1"}\n{"answer": "\xff"}\n')
    with pytest.raises(UsageError, match=rf"{path}:2: not UTF-8"):
        read(path)
    path.write_text('{"answer": NaN}', "utf-8")
    with pytest.raises(UsageError, match="NaN is not JSON"):
        read(path)
    path.write_text('{"answer": "1"}\n{"answer": [-1E400]}', "utf-8")
    with pytest.raises(UsageError, match=rf"{path}:2: not JSON: -1E400 is larger than any float"):
        read(path)
    path.write_text('{"answer": ' + "[" * 100_000 + "]" * 100_000 + "}", "utf-8")
    with pytest.raises(
        UsageError, match=rf"{path}:1: not JSON: it is nested deeper than 100 levels"
    ):
        read(path)


def test_half_a_character_is_named_with_its_line_and_a_whole_one_is_read(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(r'{"answer": "\ud83d\ude00 \\ud800"}' + "\n", "utf-8")
    assert read(path) == [(0, "\U0001f600 \\ud800")]
    path.write_text(r'{"answer": "1"}' + "\n" + r'{"answer": "\uD83D"}', "utf-8")
    with pytest.raises(UsageError, match=rf"{path}:2: .*surrogates not allowed; repair or remove"):
        read(path)


def test_what_cannot_be_opened_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind("rows.jsonl")
        with pytest.raises(UsageError, match=r"^rows\.jsonl: cannot be read after line 0: .*rows"):
            read("rows.jsonl")
    for name in ("x" * 5000, "~nobody-of-that-name/rows.jsonl", "a\0b"):
        with pytest.raises(UsageError):
            read(name)


def test_a_zipped_file_that_ends_too_early_is_named(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl.gz"
    path.write_bytes(gzip.compress(b'{"answer": "1"}\n' * 1000)[:-20])
    with pytest.raises(UsageError, match="the gzip file is broken"):
        read(path)


def test_a_json_file_is_a_list_of_rows_or_has_a_row_on_each_line(tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    for text in (json.dumps(ROWS, indent=1), "\ufeff " + json.dumps(ROWS)):
        file.write_text(text, "utf-8")
        assert read(file) == ALL
    file.write_text("\n".join(map(json.dumps, ROWS)), "utf-8")
    assert read(file) == ALL
    file.write_text('[{"answer": "0"}, 3]', "utf-8")
    with pytest.raises(UsageError, match=r"rows\.json row 1: a row is a JSON object, this is int"):
        read(file)
    file.write_text('[{"answer": NaN}]', "utf-8")
    with pytest.raises(UsageError, match=r"rows\.json: not JSON: NaN"):
        read(file)


@pytest.mark.parametrize(
    "text",
    [
        '{"train": [{"a": 1}], "test": [{"a": 2}]}',
        '{"data": [{"a": 1}]}\n',
        '\ufeff{\n  "version": 1,\n  "rows": [{"a": 1}]\n}',
        '{\n  "a": 1\n}\n',
    ],
)
def test_a_json_file_that_is_one_object_with_rows_inside_is_refused(
    text: str, tmp_path: Path
) -> None:
    file = tmp_path / "rows.json"
    file.write_text(text, "utf-8")
    with pytest.raises(UsageError, match=r"rows\.json is a single JSON object \((train|data|v|a)"):
        list(read_file(file))
    for row in ('{"train": [1], "a": 2}', '{"messages": [{"role": "user"}]}'):
        file.write_text(row, "utf-8")
        assert [values for _, values in read_file(file)] == [json.loads(row)]
    file.write_text('{"data": [1]}\n{"data": [2]}', "utf-8")
    assert len(list(read_file(file))) == 2


@pytest.mark.parametrize("delimiter", [",", ";", "\t"])
@settings(max_examples=20)
@given(
    rows=st.lists(st.lists(TEXT, min_size=3, max_size=3), max_size=5),
)
def test_every_text_that_a_spreadsheet_writes_is_read_back(
    delimiter: str, rows: list[list[str]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    file = tmp_path_factory.mktemp("csv") / "rows.csv"
    with file.open("w", encoding="utf-8-sig", newline="") as lines:
        writer = csv.writer(lines, delimiter=delimiter, quoting=csv.QUOTE_ALL)
        writer.writerows([["question", "answer", "id"], *rows, ["q", "last", "007"]])
    read_back = [list(row.values.values()) for row in list(read_rows(DataSettings(path=str(file))))]
    assert read_back == [*rows, ["q", "last", "007"]]


def test_a_row_of_a_csv_file_is_named_by_its_first_line(tmp_path: Path) -> None:
    file = tmp_path / "rows.csv"
    file.write_text('question,answer\n"two\nlines",1\n\nq,2,3\n', "utf-8")
    with pytest.raises(
        UsageError, match=r"rows\.csv:5: the row has 3 cells, the first line names 2"
    ):
        read(file)
    file.write_text('question,answer\n"two\nlines",1\n"open', "utf-8")
    with pytest.raises(UsageError, match=r"rows\.csv:4: not CSV that can be read"):
        read(file)
    file.write_text("answer,answer\n1,2\n", "utf-8")
    with pytest.raises(UsageError, match="two columns are called 'answer'"):
        read(file)
    file.write_bytes("answer\nStraße\n".encode("latin-1"))
    with pytest.raises(UsageError, match=r"not UTF-8: .* save it as CSV in UTF-8"):
        read(file)


def test_csv_files_of_a_folder_are_its_splits_and_json_files_are_not(tmp_path: Path) -> None:
    (tmp_path / "train.csv").write_text("question,answer\nq,1\n", "utf-8")
    (tmp_path / "test.csv").write_text("question,answer\nq,2\n", "utf-8")
    (tmp_path / "train-state.json").write_text("{}", "utf-8")
    assert read(tmp_path) == [(0, "1")]
    assert read(tmp_path, split="test") == [(0, "2")]


def test_a_file_that_is_missing_empty_or_of_another_kind_is_named(
    tmp_path: Path, write_rows: WriteRows
) -> None:
    with pytest.raises(UsageError, match=r"no\.jsonl: no such file or folder"):
        read(tmp_path / "no.jsonl")
    with pytest.raises(UsageError, match="is empty: there is no row to read"):
        read(write_rows([]))
    (tmp_path / "rows.xml").write_text("a,b\n", "utf-8")
    with pytest.raises(UsageError, match=r"not a data file; known: \.jsonl, \.jsonl\.gz"):
        read(tmp_path / "rows.xml")
    (tmp_path / "rows.parquet").write_bytes(b"not parquet")
    with pytest.raises(UsageError, match="not a Parquet file"):
        read(tmp_path / "rows.parquet")
    for split in ("train[10:]", "train[-1%:]"):
        with pytest.raises(UsageError, match="leaves no row of 10"):
            read(write_rows(ROWS), split=split)


def test_a_dataset_is_called_by_its_file_its_hub_id_or_its_task(write_rows: WriteRows) -> None:
    assert dataset_name(DataSettings(path=write_rows(ROWS))) == "rows.jsonl"
    assert dataset_name(DataSettings(path="openai/gsm8k")) == "openai/gsm8k"
    assert dataset_name(DataSettings(path="reasoning-gym:chain_sum")) == "reasoning-gym:chain_sum"


def test_what_json_lacks_becomes_text_or_lists_and_bytes_are_left_out(tmp_path: Path) -> None:
    row = {
        "when": datetime.datetime(2026, 1, 2, 3, 4, 5),
        "price": decimal.Decimal("1.50"),
        "nested": {"list": [datetime.date(2026, 1, 2)]},
        "image": b"\x89PNG",
        "pictures": [{"bytes": b"\x89PNG", "path": "a.png"}],
        "images": [{"bytes": b"\x89PNG", "path": "a.png"}],
    }
    table = (
        pa.Table.from_pylist([row])
        .append_column("levels", pa.array([[("a", 1)]], pa.map_(pa.string(), pa.int64())))
        .append_column("uuid", pa.array([b"ab"], pa.binary(2)))
        .append_column("view", pa.array([b"ab"], pa.binary_view()))
        .append_column("large", pa.array([b"ab"], pa.large_binary()))
    )
    pq.write_table(table, tmp_path / "rows.parquet")
    values = next(read_rows(DataSettings(path=str(tmp_path / "rows.parquet")))).values
    assert values == {
        "when": "2026-01-02T03:04:05",
        "price": "1.50",
        "nested": {"list": ["2026-01-02"]},
        "levels": [["a", 1]],
        "images": [{"bytes": "data:;base64,iVBORw==", "path": "a.png"}],
    }
    without = DataSettings(path=str(tmp_path / "rows.parquet"), images="")
    assert "images" not in next(read_rows(without)).values


def test_keys_that_say_nothing_about_a_file_are_named_and_those_that_do_are_not(
    write_rows: WriteRows,
) -> None:
    path = write_rows(ROWS)
    (note,) = unread_keys(DataSettings(path=path, size=2, seed=7))
    assert note.startswith("no effect: size, seed, of tasks and functions that generate rows")
    (note,) = unread_keys(DataSettings(path=path, split="test[:1]"))
    assert note == "a single file has no splits: 'test' is all of it, as 'train' would be"
    assert unread_keys(DataSettings(path=path, split="train[:1]", limit=1)) == []
    assert unread_keys(DataSettings(path=path, split="rows")) == []  # as the file is called
    assert unread_keys(DataSettings(path="reasoning-gym:chain_sum", size=2, seed=7)) == []
    assert unread_keys(DataSettings(path="my_module:my_rows", size=2, seed=7)) == []
    for place in (path, "reasoning-gym:chain_sum", "my_module:my_rows"):
        (note,) = unread_keys(DataSettings(path=place, name="mine"))
        assert note.startswith("no effect: name = 'mine', of hub datasets and folders")
    assert unread_keys(DataSettings(path="openai/gsm8k", name="main")) == []


def test_files_of_one_name_are_told_apart_by_the_folders_above_them(tmp_path: Path) -> None:
    paths = [tmp_path / name for name in ("a/gsm8k/train.jsonl", "a/math/train.jsonl",
                                          "b/math/train.jsonl", "b/other.jsonl")]  # fmt: skip
    for path in paths:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text('{"question": "q", "answer": "a"}\n', "utf-8")
    sets = [{"path": str(path)} for path in [*paths, paths[3]]]
    mix = MixSettings.model_validate({"sets": sets})
    assert [dataset_name(source) for source in mix.sources] == [
        "gsm8k/train.jsonl", "a/math/train.jsonl", "b/math/train.jsonl",
        "other.jsonl", "other.jsonl",
    ]  # fmt: skip
    assert dataset_name(DataSettings(path=str(paths[0]))) == "train.jsonl"
    assert dataset_name(mix.sources[0].model_copy(update={"limit": 1})) == "gsm8k/train.jsonl"


def test_evaluation_sets_of_one_name_are_told_apart_too(tmp_path: Path) -> None:
    for name in ("gsm8k", "math"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "test.jsonl").write_text('{"question": "q", "answer": "a"}\n', "utf-8")
    sets = [
        {"name": name, "path": str(tmp_path / name / "test.jsonl")} for name in ("gsm8k", "math")
    ]
    evaluation = EvalSettings.model_validate({"sets": sets})
    assert [dataset_name(eval_set.data) for eval_set in evaluation.sets] == [
        "gsm8k/test.jsonl", "math/test.jsonl",
    ]  # fmt: skip


def test_a_file_with_a_wrong_ending_is_told_the_right_one(tmp_path: Path) -> None:
    plain, listed = tmp_path / "rows.jsonl.gz", tmp_path / "rows.jsonl"
    plain.write_text('{"question": "a"}\n', "utf-8")
    listed.write_text('[{"question": "a"}]', "utf-8")
    with pytest.raises(UsageError, match=r"Not a gzipped file .* ends in \.jsonl"):
        list(read_file(plain))
    with pytest.raises(UsageError, match=r"this is list; .* ends in \.json$"):
        list(read_file(listed))
