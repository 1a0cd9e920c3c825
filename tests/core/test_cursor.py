"""Tickets are settled once, in any order, and open ones are found again."""

from itertools import islice

import pytest
from hypothesis import given
from hypothesis import strategies as st

from postgrad.core.cursor import Cursor


@given(st.permutations(list(range(30))), st.data())
def test_settled_and_open_tickets_are_all_tickets(order: list[int], data: st.DataObject) -> None:
    count = data.draw(st.integers(0, 30))
    cursor, settled = Cursor(), set(order[:count])
    while order[:count]:
        size = data.draw(st.integers(1, len(order[:count])))
        cursor, order, count = cursor.settle(order[:size]), order[size:], count - size
    assert cursor.settled == len(settled)
    assert (
        list(islice(cursor.open_tickets(), 40)) == [t for t in range(70) if t not in settled][:40]
    )
    assert all(ticket > cursor.frontier for ticket in cursor.beyond)
    assert Cursor.from_json(cursor.to_json()) == cursor


def test_the_frontier_passes_what_was_settled_beyond_it() -> None:
    cursor = Cursor().settle([1, 2, 5])
    assert cursor == Cursor(0, frozenset({1, 2, 5}))
    assert cursor.settle([0]) == Cursor(3, frozenset({5}))


@pytest.mark.parametrize("ticket", [0, 2])
def test_nothing_is_settled_twice(ticket: int) -> None:
    with pytest.raises(ValueError, match=f"ticket {ticket} is settled already"):
        Cursor().settle([0, 2]).settle([ticket])


def test_what_is_no_cursor_is_refused() -> None:
    with pytest.raises(TypeError, match="not a cursor"):
        Cursor.from_json({"frontier": "3", "beyond": []})
    with pytest.raises(KeyError):
        Cursor.from_json({"frontier": 3})
