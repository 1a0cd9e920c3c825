"""Files of rows that are damaged or made to be misread: one message, with the file and the row."""

import gzip
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from helpers import hostile_rows as hostile
from postgrad.core.errors import UsageError
from postgrad.data import files
from postgrad.data.conversations import load_conversations
from postgrad.data.files import read_file
from postgrad.data.pairs import load_labelled, load_pairs
from postgrad.data.prompts import load_prompts
from postgrad.data.settings import DataSettings, PairSettings
from postgrad.models.fresh import _bpe, _wrapped
from postgrad.models.settings import TokenizerInit

LONGEST_MESSAGE = 1500
QUICK = (
    *("a wide int in an answer", "half a surrogate pair", "UTF-16", "columns twice", "CSV"),
    *("zeros", "deep lists", "deep lists elsewhere", "many columns", "a role of marks"),
    *("half a gzip", "gzip with a wrong sum", "text that is no UTF-8", "far dates"),
    *("columns of one name", "an unknown zone", "Parquet with damage 10", "a margin of 400 digits"),
    *("half an Arrow stream", "an Arrow file without an end", "Arrow stream with damage 3"),
)


@pytest.fixture(scope="module")
def bytewise() -> Any:
    """A tokenizer that knows every text."""
    return _wrapped(_bpe(TokenizerInit(kind="bpe", vocab_size=300), ["a b c"]), 10**9)


@cache
def every() -> dict[str, tuple[str, str, bytes]]:
    """name -> (suffix, shape of the rows, content)."""
    cases: dict[str, tuple[str, str, bytes]] = {}
    for shape, table in (
        ("row", hostile.VALUES | hostile.SHAPES),
        ("chat", hostile.CHATS),
        ("pair", hostile.PAIRS),
    ):
        cases |= {name: (".jsonl", shape, content) for name, content in table.items()}
    for suffix, make in hostile.FILES.items():
        cases |= {name: (suffix, "row", content) for name, content in make()}
    return cases


def written(name: str, folder: Path) -> tuple[Path, str]:
    """A hostile file, and the shape of its rows."""
    suffix, shape, content = every()[name]
    path = folder / f"rows{suffix}"
    path.write_bytes(content)
    return path, shape


def harmless(path: Path, shape: str, tokenizer: Any) -> None:
    """Every loader reads it or raises one message of bounded length that names the file."""
    asked = DataSettings(path=str(path), messages="messages" if shape == "chat" else None)
    pairs = PairSettings(path=str(path), margin="m" if b'"m": ' in path.read_bytes()[:200] else "")
    loaders: list[Callable[[], Any]] = [
        lambda: load_conversations(asked, tokenizer),
        lambda: load_prompts(asked, tokenizer, max_prompt_tokens=500),
    ]
    if shape == "pair":
        loaders = [lambda: load_pairs(pairs, tokenizer), lambda: load_labelled(pairs, tokenizer)]
    for load in loaders:
        try:
            loaded = load()
        except UsageError as error:
            message = str(error)
        else:
            message = path.name
            assert loaded.account.kept == len({row.row for row in loaded.all()})
        assert path.name in message
        assert len(message) < LONGEST_MESSAGE


@pytest.mark.parametrize("name", QUICK)
def test_a_hostile_file_is_read_or_told_in_one_message(
    name: str, tmp_path: Path, bytewise: Any
) -> None:
    harmless(*written(name, tmp_path), bytewise)


@pytest.mark.slow
def test_every_hostile_file_is_read_or_told_in_one_message(tmp_path: Path, bytewise: Any) -> None:
    assert len(every()) > 150
    for name in every():
        harmless(*written(name, tmp_path), bytewise)
    for _, content in hostile.bombs():
        path = tmp_path / "rows.jsonl.gz"
        path.write_bytes(content)
        harmless(path, "row", bytewise)


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("columns twice", "rows.jsonl:1: not JSON: an object has 'question' twice"),
        ("deep lists elsewhere", "rows.jsonl:1: not JSON: it is nested deeper than 100 levels"),
        ("columns of one name", "rows.parquet: two columns are called 'question'"),
        ("text that is no UTF-8", "rows.parquet: rows from 0 on hold a value that cannot be read"),
        ("Arrow that is no UTF-8", "rows.arrow: not an Arrow file that can be read"),
        ("Arrow with offsets beyond its end", "rows.arrow: not an Arrow file that can be read"),
        ("far dates", "rows.parquet: rows from 0 on hold a value that cannot be read"),
    ],
)
def test_a_file_that_is_refused_says_where_and_why(name: str, why: str, tmp_path: Path) -> None:
    path, _ = written(name, tmp_path)
    with pytest.raises(UsageError) as refused:
        list(read_file(path))
    assert why in str(refused.value)


CUT = gzip.compress(hostile.GOOD, mtime=0)  # in the names of tests


@pytest.mark.parametrize(
    ("suffix", "content", "why"),
    [
        (".jsonl", CUT, "it is gzip: unpack it, or let the name of JSON lines end in .jsonl.gz"),
        (".json", b"PAR1rows", "it is Parquet: let its name end in .parquet"),
        (".csv", "a,b\n1,2\n".encode("utf-16"), "it is UTF-16: save it as UTF-8"),
        (".jsonl.gz", b"PK\3\4rows", "it is a zip archive: unpack it"),
        (".parquet", b"version https://git-lfs.github.com/spec/v1\n", "git lfs pull fetches it"),
        (".parquet", b"PAR1 and no end", "fetch it again, or write it anew"),
        (".jsonl", b"<!DOCTYPE html><html>", "it is a web page, such as one that asks for a login"),
    ],
)
def test_a_file_of_another_kind_than_its_name_says_is_told_as_what_it_is(
    suffix: str, content: bytes, why: str, tmp_path: Path
) -> None:
    path = tmp_path / f"rows{suffix}"
    path.write_bytes(content)
    with pytest.raises(UsageError, match=re.escape(why)) as refused:
        list(read_file(path))
    assert str(refused.value).startswith(f"{path}: ")


def test_a_column_of_bytes_that_is_asked_for_is_told_as_left_out(
    tmp_path: Path, bytewise: Any
) -> None:
    path = tmp_path / "rows.parquet"
    pq.write_table(pa.table({"question": pa.array([b"one?"]), "answer": pa.array(["1"])}), path)
    with pytest.raises(UsageError, match="its columns: answer; columns of bytes are not read"):
        load_prompts(DataSettings(path=str(path)), bytewise, max_prompt_tokens=50)


def test_a_line_longer_than_any_row_ends_the_reading(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "LONGEST_LINE", 2**20)
    path = tmp_path / "rows.jsonl"
    path.write_bytes(hostile.GOOD + b'{"question": "' + b"x" * 2**20 + b'"}\n')
    rows = read_file(path)
    assert next(rows)[1] == {"question": "one?", "answer": "1"}
    with pytest.raises(UsageError, match=r"rows.jsonl:2: the line has more than 1 MiB"):
        next(rows)


def test_a_hundred_levels_are_read(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"x": ' + b"[" * 98 + b"]" * 98 + b"}\n")
    assert len(list(read_file(path))) == 1


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_number_that_is_none_is_null(value: float, tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    pq.write_table(pa.table({"x": [value, 1.5]}), path)
    assert [row["x"] for _, row in read_file(path)] == [None, 1.5]


def test_a_margin_that_would_be_read_as_infinity_is_refused_as_it_is_read(
    tmp_path: Path, bytewise: Any
) -> None:
    path, _ = written("a margin beyond floats", tmp_path)
    with pytest.raises(UsageError, match=r"rows.jsonl:1: not JSON: 1e999 is larger than any float"):
        load_pairs(PairSettings(path=str(path), margin="m"), bytewise)


@pytest.mark.parametrize("name", ["a margin beyond 32 bits", "a margin of 400 digits"])
def test_a_margin_that_no_float_holds_is_refused(name: str, tmp_path: Path, bytewise: Any) -> None:
    path, _ = written(name, tmp_path)
    with pytest.raises(UsageError, match=r"rows.jsonl:1: column 'm' of row 0 is .*data.margin"):
        load_pairs(PairSettings(path=str(path), margin="m"), bytewise)
