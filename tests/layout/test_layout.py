from dataclasses import replace

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


def test_one_hidden_row_predicts_the_first_token_of_every_response(make_sequences):
    sequences = make_sequences([[[5, 6, 1], [5, 6, 2], [5, 6, 3]]])
    layout = lay_out(sequences, np.arange(3), min_shared=1)
    first = layout.target >= 1
    first &= layout.target <= 3
    assert layout.hidden_row[first].tolist() == [1, 1, 1]
    assert sorted(layout.target[first].tolist()) == [1, 2, 3]
    assert layout.positions.tolist() == [0, 1, 2, 2, 2]


def test_a_loss_token_in_a_shared_prefix_is_an_entry_of_every_sequence(make_sequences):
    sequences = make_sequences([[[5, 6, 1], [5, 6, 2]]])
    layout = lay_out(sequences, np.arange(2), min_shared=1)
    shared = layout.target == 6
    assert layout.hidden_row[shared].tolist() == [0, 0]
    assert sorted(layout.sequence[shared].tolist()) == [0, 1]


def test_loss_on_a_first_token_is_refused():
    sequences = Sequences(
        Ragged.of([[1, 2]], np.int32), Ragged.of([[True, True]]), np.zeros(1, np.int64)
    )
    with pytest.raises(ValueError, match="nothing predicts"):
        lay_out(sequences, np.arange(1))


@given(groups=token_groups, min_shared=st.integers(1, 9))
def test_every_loss_token_has_one_entry_behind_its_prefix(make_sequences, groups, min_shared):
    sequences = make_sequences(groups)
    layout = lay_out(sequences, np.arange(len(sequences)), min_shared=min_shared)
    assert sorted(layout.column.tolist()) == np.flatnonzero(sequences.loss_mask.values).tolist()
    rows = np.arange(layout.n_tokens)
    for hidden, target, sequence, column in zip(
        layout.hidden_row, layout.target, layout.sequence, layout.column, strict=True
    ):
        tokens = sequences.tokens.row(sequence)
        place = column - sequences.tokens.offsets[sequence]
        assert tokens[place] == target
        seen = rows[(rows <= hidden) & (hidden < layout.subtree_end)]
        assert layout.token_ids[seen].tolist() == tokens[:place].tolist()
        assert layout.positions[seen].tolist() == list(range(place))


@given(groups=token_groups, multiple=st.integers(1, 5))
def test_padding_changes_nothing_of_what_is_there(make_sequences, groups, multiple):
    sequences = make_sequences(groups)
    layout = lay_out(sequences, np.arange(len(sequences)), min_shared=1)
    padded, n = layout.padded(multiple), layout.n_tokens
    assert padded.n_tokens % multiple == 0
    assert padded.n_tokens - n < multiple
    for name in ("token_ids", "positions", "subtree_end", "copies"):
        assert getattr(padded, name)[:n].tolist() == getattr(layout, name).tolist()
    for name in ("hidden_row", "target", "sequence", "column", "n_sequences"):
        assert np.array_equal(getattr(padded, name), getattr(layout, name))
    rows = np.arange(padded.n_tokens)
    for row in rows[n:]:  # sees padding alone, and nothing of a sequence sees it
        assert (
            rows[(rows <= row) & (row < padded.subtree_end)].tolist() == rows[n : row + 1].tolist()
        )
        assert padded.copies[row] == 0
        assert padded.positions[row] == row - n
    assert np.diff(padded.segment_start).sum() == padded.n_tokens
    assert len(padded.parent) == len(padded.segment_start) - 1


def test_padding_has_experts_and_positions_of_images_too(make_sequences):
    layout = lay_out(make_sequences([[[5, 6, 1]]]), np.arange(1), min_shared=1)
    experts, places = np.arange(6).reshape(3, 1, 2), np.arange(3)
    layout = replace(
        layout, experts=experts, rotary=np.tile(places, (3, 1)), seen=np.tile(places, (2, 1))
    )
    padded = layout.padded(5)
    assert padded.experts is not None
    assert padded.experts[3:].tolist() == [[[0, 1]], [[0, 1]]]
    for positions in (padded.rotary, padded.seen):
        assert positions is not None
        assert positions[:, 3:].tolist() == [[0, 1]] * len(positions)


@given(groups=token_groups)
def test_sequences_of_different_groups_share_nothing(make_sequences, groups):
    sequences = make_sequences(groups)
    together = lay_out(sequences, np.arange(len(sequences)), min_shared=1).n_tokens
    apart = sum(
        lay_out(sequences, np.flatnonzero(sequences.group == g), min_shared=1).n_tokens
        for g in range(len(groups))
    )
    assert together == apart
