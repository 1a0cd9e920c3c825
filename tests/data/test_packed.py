"""Rows in buffers and files: what is read is what was added, and other values have other bytes."""

import errno
import gc
import os
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from postgrad.core.array_files import open_arrays, write_arrays
from postgrad.core.errors import DiskFull, RunError
from postgrad.data import packed as packing
from postgrad.data.account import Bookkeeper
from postgrad.data.packed import PackedJson, StoredBytes, StoredColumn
from postgrad.data.rows import PackedRows, Row
from postgrad.data.settings import DataSettings

VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text(st.characters(codec=None)),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)


def packed(values: list[Any]) -> PackedJson[Any]:
    packed_values: PackedJson[Any] = PackedJson()
    for value in values:
        packed_values.append(value)
    return packed_values


def bytes_of(values: list[Any]) -> bytes:
    return b"".join(packed(values).stored.pieces())


def exactly(value: Any) -> str:
    """Tells 1 from 1.0 and True, and keys in another order."""
    return ascii(value)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's cache folder, where all but the last 8 bytes of anything lie in a file."""
    monkeypatch.setenv("POSTGRAD_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(packing, "IN_MEMORY", 8)
    return tmp_path / "cache"


@given(st.lists(st.binary(max_size=12), max_size=8), st.data())
def test_bytes_are_read_at_any_place_in_memory_and_in_the_file(
    parts: list[bytes], data: st.DataObject
) -> None:
    together = b"".join(parts)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packing, "IN_MEMORY", 8)
        patch.setattr(packing, "PIECE", 5)
        stored = StoredBytes()
        for part in parts:
            stored.add(part)
        assert len(stored) == len(together)
        begin = data.draw(st.integers(0, len(together)))
        end = data.draw(st.integers(begin, len(together)))
        assert stored.read(begin, end) == together[begin:end]
        assert b"".join(stored.pieces()) == together


def test_what_is_small_needs_no_file_and_what_is_large_has_one_without_a_name(cache: Path) -> None:
    small, large = StoredBytes(), StoredBytes()
    small.add(b"1234567")
    assert not cache.exists()
    gc.collect()
    before = psutil.Process().num_fds()
    large.add(b"12345678")
    assert large.read(2, 5) == b"345"
    assert [*(cache / "rows").iterdir()] == []
    assert psutil.Process().num_fds() == before + 1
    del large
    gc.collect()
    assert psutil.Process().num_fds() == before  # its place on the disk is free again


def test_a_cache_folder_that_takes_no_file_sends_rows_to_the_folder_for_temporary_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packing, "IN_MEMORY", 8)
    monkeypatch.setattr(packing, "_elsewhere", {})
    (tmp_path / "file").write_text("", "utf-8")
    monkeypatch.setenv("POSTGRAD_CACHE", str(tmp_path / "file" / "cache"))
    stored = StoredBytes()
    stored.add(b"123456789")
    assert stored.read(0, 9) == b"123456789"
    StoredBytes().add(b"123456789")
    (note,) = packing.notes_of_place()
    assert note.startswith(f"the rows' files are in {tempfile.gettempdir()}, which may be a part")
    assert f"{tmp_path / 'file' / 'cache'}" in note
    assert packing.notes_of_place() == []  # once is enough


def test_rows_in_the_folder_for_temporary_files_are_told_with_their_account(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packing, "IN_MEMORY", 8)
    monkeypatch.setattr(packing, "_elsewhere", {})
    monkeypatch.setattr(packing, "cache_folder", lambda content: None)
    book = Bookkeeper("rows.jsonl", read=1)
    book.add("kept", Row(0, "rows.jsonl:1", {}))
    StoredBytes().add(b"123456789")
    (note,) = book.close(DataSettings(path="rows.jsonl"), "4 tokens").notes
    assert "there is no home folder; POSTGRAD_CACHE names another" in note


def test_a_full_disk_is_one_message_with_the_way_out(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(DiskFull) as caught:
        StoredBytes().add(b"123456789")
    message = str(caught.value)
    assert f"No space left on device: '{cache / 'rows'}'" in message
    assert message.endswith("name a folder of another disk with POSTGRAD_CACHE")


def test_a_file_that_is_cut_while_it_is_read_is_an_error_and_ends_no_process(
    tmp_path: Path,
) -> None:
    """A map of it into memory would: SIGBUS."""
    path = tmp_path / "entry.safetensors"
    write_arrays(path, {"token_ids": np.arange(5000, dtype=np.int32)})
    stored = open_arrays(path)["token_ids"]
    column = StoredColumn(StoredBytes(stored), stored.dtype, np.array([0, 5000]))
    assert column.part(4998, 5000).tolist() == [4998, 4999]
    os.truncate(path, 4096)
    with pytest.raises(RunError, match="cut to 4096 bytes") as caught:
        column.row(0)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("deleted", [True, False])
def test_a_file_that_is_deleted_or_replaced_keeps_its_numbers_for_who_reads_it(
    deleted: bool, tmp_path: Path
) -> None:
    path = tmp_path / "entry.safetensors"
    write_arrays(path, {"token_ids": np.arange(10, dtype=np.int32)})
    stored = open_arrays(path)["token_ids"]
    column = StoredColumn(StoredBytes(stored), stored.dtype, np.array([0, 4, 10]))
    if deleted:
        path.unlink()
    else:
        write_arrays(path, {"token_ids": np.zeros(10, np.int32)})
    assert [row.tolist() for row in column] == [[0, 1, 2, 3], [4, 5, 6, 7, 8, 9]]


def test_what_a_column_gives_is_an_array_of_its_own() -> None:
    stored = StoredBytes()
    stored.add(np.arange(6, dtype=np.int32).data)
    column = StoredColumn(stored, np.dtype(np.int32), np.array([0, 0, 6]))
    assert (len(column), column.shape, column.lengths.tolist()) == (2, (6,), [0, 6])
    assert column.row(0).tolist() == []
    column.row(1)[:] = 0
    assert column.row(1).tolist() == [0, 1, 2, 3, 4, 5]


@given(st.lists(VALUES, max_size=4))
def test_values_are_read_as_they_were_added(values: list[Any]) -> None:
    packed_values = packed(values)
    assert len(packed_values) == len(values)
    assert [*map(exactly, packed_values)] == [*map(exactly, values)]


@given(VALUES, VALUES)
def test_other_values_have_other_bytes(first: Any, second: Any) -> None:
    same = bytes_of([first]) == bytes_of([second])
    assert same == (exactly(first) == exactly(second))


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (float("inf"), None),
        (10**30, 1e30),
        (1, True),
        (1, 1.0),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
    ],
)
def test_what_json_readers_confuse_has_other_bytes(first: Any, second: Any) -> None:
    assert bytes_of([[{"role": first}]]) != bytes_of([[{"role": second}]])


def test_a_line_break_in_a_text_ends_no_line() -> None:
    assert bytes_of(["a\nb", "c"]).count(b"\n") == 2


def test_rows_keep_their_index_and_place() -> None:
    rows = PackedRows()
    for index, place in ((3, "a.jsonl:4"), (7, "b\udcff.jsonl:8")):  # a name that is not UTF-8
        rows.append(Row(index, {"question": "x"}, place))
    assert [*rows] == [Row(3, {}, "a.jsonl:4"), Row(7, {}, "b\udcff.jsonl:8")]
    assert rows.index.tolist() == [3, 7]
