"""Tokens in long columns, against lists."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from postgrad.data import texts
from postgrad.data.account import Bookkeeper
from postgrad.data.packed import StoredColumn
from postgrad.data.rows import PackedRows, Row
from postgrad.data.texts import (
    KEPT,
    NO_LOSS,
    TOO_LONG,
    TRUNCATED,
    GrowingColumn,
    MarkedTokens,
    columns_of,
    count_fates,
    fates_of_lengths,
    in_rows,
    last_learned,
)

MASKS = st.lists(st.booleans(), max_size=40)


def stored(values: np.ndarray) -> StoredColumn:
    """One sequence in a column."""
    growing = GrowingColumn(values.dtype)
    growing.append(values)
    return growing.column()


@given(st.lists(MASKS, min_size=1, max_size=6))
def test_the_last_token_with_a_loss_is_found_in_every_text(masks: list[list[bool]]) -> None:
    edges = np.cumsum([0, *map(len, masks)])
    joined = np.array([bit for mask in masks for bit in mask], np.bool_)
    last = last_learned(stored(joined), edges[:-1], edges[1:])
    for mask, begin, place in zip(masks, edges, last, strict=False):
        if any(mask):
            assert place == begin + max(n for n, bit in enumerate(mask) if bit)
        else:
            assert place < begin or place == -1


@pytest.mark.parametrize("together", [1, 3, 7, 8, 1000])
def test_many_texts_are_looked_at_a_few_at_a_time(
    together: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(texts, "TOGETHER", together)
    mask = np.tile([False, True, False], 30)
    edges = np.arange(31) * 3
    assert (last_learned(stored(mask), edges[:-1], edges[1:]) == edges[:-1] + 1).all()


@given(st.lists(st.tuples(MASKS, st.booleans()), max_size=6))
def test_weights_are_the_mask_where_a_text_has_none(rows: list[tuple[list[bool], bool]]) -> None:
    """The first text with weights may come late: those before it have what the mask says."""
    given_texts = [
        MarkedTokens(
            np.arange(len(mask), dtype=np.int32),
            np.array(mask, np.bool_),
            np.array(mask, np.float32) / np.float32(2) if weighted else None,
        )
        for mask, weighted in rows
    ]
    columns = columns_of(given_texts)
    assert [row.tolist() for row in columns["loss_mask"]] == [mask for mask, _ in rows]
    assert ("loss_weights" in columns) == any(weighted for _, weighted in rows)
    if "loss_weights" in columns:
        expected = [[bit / (1 + weighted) for bit in mask] for mask, weighted in rows]
        assert [row.tolist() for row in columns["loss_weights"]] == expected


@given(st.lists(st.lists(st.integers(0, 3), max_size=3), max_size=5))
def test_further_texts_of_rows_begin_where_the_texts_before_them_end(
    lengths: list[list[int]],
) -> None:
    """lengths: of the texts of each row; a text without tokens begins nowhere."""
    flat = [length for row in lengths for length in row]
    texts = (MarkedTokens(np.zeros(n, np.int32), np.ones(n, np.bool_)) for n in flat)
    columns = in_rows(texts, np.array([len(row) for row in lengths], np.int64))
    assert columns["token_ids"].lengths.tolist() == [sum(row) for row in lengths]
    expected: list[tuple[int, int]] = []
    begin = 0
    for number, row in enumerate(lengths):
        first = begin
        for length in row:
            if length and begin > first:
                expected.append((number, begin))
            begin += length
    further_texts = zip(columns.owners().tolist(), columns.further.tolist(), strict=True)
    assert [*further_texts] == expected


@given(st.lists(st.lists(st.integers(0, 9), max_size=4), max_size=5))
def test_a_growing_column_has_the_sequences_that_it_got(rows: list[list[int]]) -> None:
    growing = GrowingColumn(np.int32)
    for row in rows:
        growing.append(np.array(row, np.int32))
    column = growing.column()
    assert all(row.dtype == np.int32 for row in column)
    assert [row.tolist() for row in column] == rows


def test_lengths_decide_by_the_limit() -> None:
    lengths = np.array([3, 4, 5])
    assert fates_of_lengths(lengths, 4, "truncate").tolist() == [KEPT, KEPT, TRUNCATED]
    assert fates_of_lengths(lengths, 4, "drop").tolist() == [KEPT, KEPT, TOO_LONG]


def test_rows_are_counted_with_the_first_of_each_fate_as_its_example() -> None:
    rows = PackedRows()
    for number in range(5):
        rows.append(Row(number, {}, f"rows.jsonl:{number + 1}"))
    book = Bookkeeper("rows.jsonl", read=6)
    book.add("no_loss", Row(9, {}, "rows.jsonl:9"))  # before the others were tokens
    count_fates(book, np.array([NO_LOSS, KEPT, KEPT, TRUNCATED, KEPT], np.int8), rows)
    assert book.counts == {"kept": 3, "truncated": 1, "no_loss": 2}
    places = {"kept": "rows.jsonl:2", "truncated": "rows.jsonl:4", "no_loss": "rows.jsonl:1"}
    assert book.examples == places
