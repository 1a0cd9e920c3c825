"""Turns of the policy in sequences of several turns, and the states that they answer."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from postgrad.core.ragged import Ragged
from postgrad.core.records import Sequences, with_images


class PolicyTurn(NamedTuple):
    """A turn of the policy: tokens `begin` to `end` of sequence `row`."""

    row: int
    begin: int
    end: int
    read: int  # where what it answers begins: behind the turn before, or with the conversation


def policy_turns(sequences: Sequences, written: Ragged) -> Iterator[PolicyTurn]:
    """The turns of the policy, in order. written: bool [N] its tokens."""
    for row, of_policy in enumerate(written):
        edges: list[int] = np.flatnonzero(np.diff(of_policy, prepend=False, append=False)).tolist()
        conversations = [begin for begin, _ in sequences.conversations(row)]
        before = 0
        for begin, end in zip(edges[::2], edges[1::2], strict=True):
            opened = max(at for at in conversations if at <= begin)
            yield PolicyTurn(row, begin, end, max(before, opened))
            before = end


def numbered_states(sequences: Sequences, turns: Sequence[PolicyTurn]) -> NDArray[np.int64]:
    """[turns] a number for each state, equal for turns of a group that answer the same."""
    numbers: dict[tuple[int, bytes], int] = {}
    read = [
        with_images(tokens, sequences.images_of(row)) for row, tokens in enumerate(sequences.tokens)
    ]
    groups: list[int] = sequences.group.tolist()
    states = [
        (groups[turn.row], read[turn.row][turn.read : turn.begin].tobytes()) for turn in turns
    ]
    return np.array([numbers.setdefault(state, len(numbers)) for state in states], np.int64)
