"""Rows in buffers: what is read is what was added, and other values have other bytes."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from postgrad.data.packed import PackedJson, PackedRows
from postgrad.data.rows import Row

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
    found: PackedJson[Any] = PackedJson()
    for value in values:
        found.append(value)
    return found


def exactly(value: Any) -> str:
    """Tells 1 from 1.0 and True, and keys in another order."""
    return ascii(value)


@given(st.lists(VALUES, max_size=4))
def test_values_are_read_as_they_were_added(values: list[Any]) -> None:
    found = packed(values)
    assert len(found) == len(values)
    assert [*map(exactly, found)] == [*map(exactly, values)]
    last = np.arange(len(values))[1:]
    assert [*map(exactly, found.take(last))] == [*map(exactly, values[1:])]


@given(VALUES, VALUES)
def test_other_values_have_other_bytes(first: Any, second: Any) -> None:
    same = packed([first]).buffer == packed([second]).buffer
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
    assert packed([[{"role": first}]]).buffer != packed([[{"role": second}]]).buffer


def test_a_line_break_in_a_text_ends_no_line() -> None:
    assert packed(["a\nb", "c"]).buffer.count(b"\n") == 2


def test_rows_keep_their_index_and_place() -> None:
    rows = PackedRows()
    for index, place in ((3, "a.jsonl:4"), (7, "b\udcff.jsonl:8")):  # a name that is not UTF-8
        rows.append(Row(index, {"question": "x"}, place))
    assert [*rows] == [Row(3, {}, "a.jsonl:4"), Row(7, {}, "b\udcff.jsonl:8")]
    assert rows.index.tolist() == [3, 7]
