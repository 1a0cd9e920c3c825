"""Tokens in large arrays, against lists."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from postgrad.data import texts
from postgrad.data.account import Bookkeeper
from postgrad.data.packed import PackedRows
from postgrad.data.rows import Row
from postgrad.data.texts import (
    KEPT,
    NO_LOSS,
    TOO_LONG,
    TRUNCATED,
    GrowingColumn,
    TokenStore,
    count_fates,
    fates_of_lengths,
    last_learned,
)

MASKS = st.lists(st.booleans(), max_size=40)


@given(MASKS, st.data())
def test_a_part_has_the_tokens_and_the_mask_of_its_place(
    mask: list[bool], data: st.DataObject
) -> None:
    store = TokenStore.of(np.arange(len(mask), dtype=np.int32), np.array(mask, np.bool_))
    begin = data.draw(st.integers(0, len(mask)))
    end = data.draw(st.integers(begin, len(mask)))
    ids, part = store.part(begin, end)
    assert ids.tolist() == list(range(begin, end))
    assert part.dtype == np.bool_
    assert part.tolist() == mask[begin:end]
    part[:] = False  # the next draw has its own
    assert store.part(begin, end)[1].tolist() == mask[begin:end]


@given(st.lists(MASKS, min_size=1, max_size=6))
def test_the_last_token_with_a_loss_is_found_in_every_text(masks: list[list[bool]]) -> None:
    edges = np.cumsum([0, *map(len, masks)])
    joined = np.array([bit for mask in masks for bit in mask], np.bool_)
    last = last_learned(joined, edges[:-1], edges[1:])
    for mask, begin, place in zip(masks, edges, last, strict=False):
        if any(mask):
            assert place == begin + max(n for n, bit in enumerate(mask) if bit)
        else:
            assert place < begin or place == -1


def test_many_texts_are_looked_at_in_blocks() -> None:
    count = texts.BLOCK + 3
    mask = np.tile([False, True, False], count)
    edges = np.arange(count + 1) * 3
    assert (last_learned(mask, edges[:-1], edges[1:]) == edges[:-1] + 1).all()


@given(st.lists(st.lists(st.integers(0, 9), max_size=4), max_size=5))
def test_a_growing_column_has_the_sequences_that_it_got(rows: list[list[int]]) -> None:
    growing = GrowingColumn(np.int32)
    for row in rows:
        growing.append(np.array(row, np.int32))
    column = growing.column()
    assert column.values.dtype == np.int32
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
