"""Sequences of several conversations: each is read by itself, and all are one sequence's loss."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from postgrad.core.ragged import Ragged
from postgrad.core.records import Sequences
from postgrad.layout.cut import cut, share
from postgrad.layout.layout import lay_out

rows_of_conversations = st.lists(
    st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=12), min_size=1, max_size=4),
    min_size=1,
    max_size=4,
)


def joined(rows: list[list[list[int]]]) -> Sequences:
    """One group, whose sequences are these conversations end to end. Every token bears loss but the
    first of a conversation.
    """
    tokens = [[token for part in row for token in part] for row in rows]
    masks = [[place > 0 for part in row for place in range(len(part))] for row in rows]
    openings = tuple(tuple(np.cumsum([len(part) for part in row])[:-1].tolist()) for row in rows)
    group = np.zeros(len(rows), np.int64)
    columns = Ragged.of(tokens, np.int32), Ragged.of(masks, np.bool_)
    return Sequences(*columns, group, openings=openings)


def apart(rows: list[list[list[int]]]) -> Sequences:
    """The same conversations as sequences of their own."""
    parts = [part for row in rows for part in row]
    masks = [[place > 0 for place in range(len(part))] for part in parts]
    group = np.zeros(len(parts), np.int64)
    return Sequences(Ragged.of(parts, np.int32), Ragged.of(masks, np.bool_), group)


@given(rows=rows_of_conversations, min_shared=st.integers(1, 9))
def test_a_layout_of_conversations_is_that_of_as_many_sequences(rows, min_shared):
    together = lay_out(joined(rows), np.arange(len(rows)), min_shared=min_shared)
    parts = apart(rows)
    separate = lay_out(parts, np.arange(len(parts)), min_shared=min_shared)
    for name in ("token_ids", "positions", "subtree_end", "segment_start", "parent", "copies"):
        assert np.array_equal(getattr(together, name), getattr(separate, name))
    for name in ("hidden_row", "target", "column"):
        assert np.array_equal(getattr(together, name), getattr(separate, name))
    owner = np.repeat(np.arange(len(rows)), [len(row) for row in rows])
    assert together.sequence.tolist() == owner[separate.sequence].tolist()
    assert together.n_sequences == len(rows)


@given(rows=rows_of_conversations, most=st.integers(48, 60))
def test_all_conversations_of_a_sequence_are_in_one_run_and_count_for_its_budget(rows, most):
    sequences = joined(rows)
    runs = cut(sequences, np.arange(len(rows)), max_tokens=most, min_shared=1)
    assert np.concatenate(runs).tolist() == list(range(len(rows)))
    for run in runs:
        assert lay_out(sequences, run, min_shared=1).n_tokens <= most
    shares = share(sequences, np.arange(len(rows)), 2, min_shared=1)
    assert sorted(np.concatenate(shares).tolist()) == list(range(len(rows)))


def test_what_conversations_begin_with_alike_is_computed_once():
    begin = list(range(10, 30))
    layout = lay_out(joined([[[*begin, 1, 2], [*begin, 3], [*begin, 1, 2, 4]]]), np.arange(1))
    assert layout.n_tokens == 20 + 2 + 1 + 3
    layout = lay_out(joined([[[*begin, 1, 2], [*begin, 3]]]), np.arange(1), min_shared=1)
    assert layout.n_tokens == 20 + 2 + 1


def test_loss_on_the_first_token_of_a_later_conversation_is_refused():
    sequences = joined([[[1, 2], [3, 4]]])
    everywhere = sequences.tokens.like(np.array([False, True, True, True]))
    with pytest.raises(ValueError, match="first token of a conversation"):
        lay_out(replace(sequences, loss_mask=everywhere), np.arange(1))


def test_taken_sequences_keep_their_conversations():
    taken = joined([[[1, 2]], [[3], [4, 5]], [[6, 7], [8]]]).take(np.array([2, 0]))
    assert [taken.conversations(row) for row in range(2)] == [[(0, 2), (2, 3)], [(0, 2)]]
