"""Layouts that read the hidden state at a token, as reward models do, not the one before it."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from postgrad.core.ragged import Ragged
from postgrad.core.records import Sequences
from postgrad.layout.layout import lay_out

token_groups = st.lists(
    st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=20), min_size=1, max_size=5),
    min_size=1,
    max_size=4,
)


def last_only(sequences: Sequences) -> Sequences:
    mask = np.zeros(len(sequences.tokens.values), bool)
    mask[sequences.tokens.offsets[1:] - 1] = True
    return dataclasses.replace(sequences, loss_mask=sequences.tokens.like(mask))


@given(groups=token_groups, min_shared=st.integers(1, 9))
def test_an_entry_reads_the_row_that_has_seen_its_whole_sequence(
    make_sequences, groups, min_shared
):
    sequences = last_only(make_sequences(groups))
    rows = np.arange(len(sequences))
    layout = lay_out(sequences, rows, reads="at", min_shared=min_shared)
    assert sorted(layout.sequence.tolist()) == rows.tolist()
    places = np.arange(layout.n_tokens)
    for hidden, target, sequence in zip(
        layout.hidden_row, layout.target, layout.sequence, strict=True
    ):
        seen = places[(places <= hidden) & (hidden < layout.subtree_end)]
        tokens = sequences.tokens.row(sequence)
        assert layout.token_ids[seen].tolist() == tokens.tolist()
        assert tokens[-1] == target


@given(groups=token_groups, min_shared=st.integers(1, 9))
def test_it_is_one_row_further_on_the_path_than_the_state_before(
    make_sequences, groups, min_shared
):
    sequences = make_sequences(groups)
    rows = np.arange(len(sequences))
    before = lay_out(sequences, rows, min_shared=min_shared)
    at = lay_out(sequences, rows, reads="at", min_shared=min_shared)
    for name in ("token_ids", "positions", "subtree_end", "target", "sequence", "column"):
        np.testing.assert_array_equal(getattr(before, name), getattr(at, name))
    np.testing.assert_array_equal(
        at.positions[at.hidden_row], before.positions[before.hidden_row] + 1
    )
    np.testing.assert_array_equal(at.token_ids[at.hidden_row], at.target)


def test_a_sequence_of_one_token_can_be_scored_but_not_predicted():
    sequences = Sequences(Ragged.of([[5]], np.int32), Ragged.of([[True]]), np.zeros(1, np.int64))
    assert lay_out(sequences, np.arange(1), reads="at").hidden_row.tolist() == [0]
    with pytest.raises(ValueError, match="nothing predicts"):
        lay_out(sequences, np.arange(1))


def test_a_sequence_that_is_the_opening_of_another_ends_in_the_shared_part(make_sequences):
    sequences = last_only(make_sequences([[[1, 2, 3], [1, 2, 3, 4]]]))
    layout = lay_out(sequences, np.arange(2), reads="at", min_shared=1)
    assert layout.n_tokens == 4
    assert dict(zip(layout.sequence.tolist(), layout.hidden_row.tolist(), strict=True)) == {
        0: 2,
        1: 3,
    }
