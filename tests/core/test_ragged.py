"""Ragged columns are lists of rows without padding."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from postgrad.core.ragged import Ragged

ROWS = st.lists(st.lists(st.integers(-1000, 1000), max_size=6), max_size=8)


@given(ROWS)
def test_rows_come_back_with_their_lengths_and_sums(rows: list[list[int]]) -> None:
    ragged = Ragged.of(rows, np.int64)
    assert [row.tolist() for row in ragged] == rows
    assert ragged.lengths.tolist() == [len(row) for row in rows]
    assert ragged.sums().tolist() == [float(sum(row)) for row in rows]
    assert ragged.rows.tolist() == [i for i, row in enumerate(rows) for _ in row]


@given(ROWS, st.data())
def test_rows_are_taken_in_the_order_named(rows: list[list[int]], data: st.DataObject) -> None:
    wanted = data.draw(st.lists(st.integers(0, len(rows) - 1))) if rows else []
    taken = Ragged.of(rows, np.int64).take(wanted)
    assert [row.tolist() for row in taken] == [rows[i] for i in wanted]


def test_a_value_per_sequence_is_spread_over_its_tokens() -> None:
    spread = Ragged.of([[1, 2], [], [3]]).spread(np.array([0.5, 9.0, 0.25]))
    assert spread.values.tolist() == [0.5, 0.5, 0.25]
    assert spread.lengths.tolist() == [2, 0, 1]


def test_offsets_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="offsets end at 3, values at 2"):
        Ragged(np.zeros(2), np.array([0, 3]))
    with pytest.raises(ValueError, match="offsets have to rise"):
        Ragged(np.zeros(2), np.array([0, 3, 2]))
