"""Turns of the policy: where they are, and which of them answer the same."""

from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from postgrad.core.ragged import Ragged
from postgrad.core.records import PlacedImage, Sequences
from postgrad.ops.turns import PolicyTurn, numbered_states, policy_turns

# A prompt of two tokens, a turn of one, a reply of two, a turn of one.
TOKENS, WRITTEN = [[1, 2, 3, 8, 9, 4], [1, 2, 5, 8, 9, 6]], [[0, 0, 1, 0, 0, 1]] * 2


def states(group: tuple[int, int] = (0, 0), **parts: Any) -> list[int]:
    """Of the two turns of two sequences that differ in what the policy wrote."""
    written = Ragged.of(WRITTEN, np.bool_)
    sequences = Sequences(Ragged.of(TOKENS, np.int32), written, np.array(group), **parts)
    return numbered_states(sequences, [*policy_turns(sequences, written)]).tolist()


def test_turns_that_read_the_same_answer_one_state_in_their_group_alone() -> None:
    assert states() == [0, 1, 0, 1]
    assert states(group=(0, 1)) == [0, 1, 2, 3]


def test_a_state_is_its_tokens_and_its_images() -> None:
    def placed(*digests: str) -> Any:
        return tuple((PlacedImage(digest * 32, np.array([3])),) for digest in digests)

    assert states(images=placed("ab", "ab")) == [0, 1, 0, 1]
    assert states(images=placed("ab", "cd")) == [0, 1, 0, 2]


def test_the_state_of_another_conversation_is_all_that_is_read_there() -> None:
    """The second conversation begins with the reply, or at the last token of it."""
    assert states(openings=((3,), (3,))) == [0, 1, 0, 1]
    assert states(openings=((4,), (4,))) == [0, 1, 0, 1]
    assert states(openings=((3,), (4,))) == [0, 1, 0, 2]


@given(rows=st.lists(st.lists(st.booleans(), min_size=1, max_size=12), max_size=4))
def test_turns_hold_every_token_of_the_policy_once_and_what_they_read_is_not_its(
    rows: list[list[bool]],
) -> None:
    written = Ragged.of(rows, np.bool_)
    tokens = written.like(np.zeros(len(written.values), np.int32))
    sequences = Sequences(tokens, written, np.zeros(len(rows), np.int64))
    turns = [*policy_turns(sequences, written)]
    assert turns == sorted(turns)
    held = [[False] * len(row) for row in rows]
    for turn in turns:
        for at in range(turn.begin, turn.end):
            assert not held[turn.row][at]
            held[turn.row][at] = True
        assert not any(rows[turn.row][turn.read : turn.begin])
        assert turn.read == 0 or rows[turn.row][turn.read - 1]
    assert held == rows


def test_a_sequence_without_a_turn_has_none() -> None:
    written = Ragged.of([[0, 0], [0, 1]], np.bool_)
    sequences = Sequences(written.like(np.zeros(4, np.int32)), written, np.zeros(2, np.int64))
    assert [*policy_turns(sequences, written)] == [PolicyTurn(1, 1, 2, 0)]
