"""Which samples a page shows."""

import itertools
import json
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from postgrad.observe.report.selection import Cap, Group, SampleSelection, heads

LINE = 100  # bytes


def groups(steps: int, each: int, size: int, rows: int = 10**6) -> Iterator[Group]:
    """Groups as a file has them; ticket t is of row t modulo rows."""
    at = 0
    for ticket in range(steps * each):
        order = ((ticket % rows) * 7919 % 10007).to_bytes(8, "big")
        spans = [(at + LINE * i, LINE) for i in range(size)]
        at += LINE * size
        yield Group(ticket // each + 1, ticket, order, spans)


def samples(selected: list[Group]) -> int:
    return sum(len(group.spans) for group in selected)


def test_everything_is_taken_where_it_fits() -> None:
    chosen = SampleSelection(Cap(samples=96)).take(groups(6, 4, 4))
    assert chosen == list(groups(6, 4, 4))


def test_uneven_steps_are_taken_whole_where_all_of_them_fit() -> None:
    first = Group(1, 0, b"a", [(0, 900)])
    later = [Group(step, step, b"b", [(1000 * step, 10)]) for step in (2, 3, 4)]
    assert SampleSelection(Cap(bytes=1000.0)).take(iter([first, *later])) == [first, *later]


def test_steps_share_the_cap_and_groups_stay_whole() -> None:
    selection = SampleSelection(Cap(samples=1000))
    chosen = selection.take(groups(steps=50, each=64, size=8))
    assert samples(chosen) == selection.taken == 1000
    assert selection.seen == 50 * 64 * 8
    a_step = Counter(group.step for group in chosen)
    assert set(a_step) == set(range(1, 51))
    assert max(a_step.values()) - min(a_step.values()) <= 1
    assert {len(group.spans) for group in chosen} == {8}


def test_groups_too_large_for_every_step_are_spread_over_some() -> None:
    chosen = SampleSelection(Cap(samples=80)).take(groups(steps=100, each=4, size=8))
    steps = [group.step for group in chosen]
    assert len(steps) == 10
    gaps = [b - a for a, b in itertools.pairwise(steps)]
    assert max(gaps) <= 20


def test_bytes_bound_what_is_taken_too() -> None:
    chosen = SampleSelection(Cap(bytes=3200.0)).take(groups(steps=4, each=8, size=4))
    assert sum(group.bytes for group in chosen) == 3200


def test_a_prompt_that_comes_again_is_taken_again() -> None:
    chosen = SampleSelection(Cap(samples=400)).take(groups(steps=40, each=50, size=4, rows=50))
    rows = Counter(group.ticket % 50 for group in chosen)
    assert len(rows) <= 3  # the same two or three of fifty, at each of the forty steps
    assert samples(chosen) == 400


def test_a_first_group_larger_than_the_cap_is_shown_all_the_same() -> None:
    assert samples(SampleSelection(Cap(samples=2)).take(groups(steps=3, each=2, size=8))) == 8


@given(st.integers(1, 30), st.integers(1, 6), st.integers(1, 5), st.integers(8, 200))
def test_a_run_followed_step_by_step_never_passes_the_cap(
    steps: int, each: int, size: int, cap: int
) -> None:
    selection = SampleSelection(Cap(samples=cap), expected_steps=steps)
    every_group = list(groups(steps, each, size))
    chosen: list[Group] = []
    for step in range(1, steps + 1):
        chosen += selection.take(group for group in every_group if group.step == step)
    assert samples(chosen) == selection.taken <= max(cap, size)
    assert selection.seen == steps * each * size
    assert len({group.ticket for group in chosen}) == len(chosen)


def test_a_file_larger_than_memory_is_thinned_on_the_way() -> None:
    chosen = SampleSelection(Cap(samples=16)).take(groups(steps=32, each=8, size=2))
    assert samples(chosen) == 16
    assert len({group.step for group in chosen}) == 8


def lines(*samples: Any) -> Iterator[tuple[int, bytes]]:
    at = 0
    for sample in samples:
        text = sample if isinstance(sample, bytes) else json.dumps(sample).encode()
        yield at, text
        at += len(text)


def test_lines_of_a_ticket_and_step_are_a_group_whatever_their_form() -> None:
    def line(step: int, ticket: int, sample: int) -> dict[str, Any]:
        return {"step": step, "ticket": ticket, "sample": sample, "dataset": 'a"b', "row": 3}

    other = {"row": 3, "dataset": 'a"b', "sample": 0, "ticket": 8, "step": 1}
    bad: list[int] = []
    all_heads = list(
        heads(lines(line(1, 7, 0), b"{torn", line(1, 7, 1), other, line(2, 7, 0)), bad)
    )
    assert [(group.step, group.ticket, len(group.spans)) for group in all_heads] == [
        (1, 7, 2),
        (1, 8, 1),
        (2, 7, 1),
    ]
    assert len({group.order for group in all_heads}) == 1  # one row, however the line is written
    assert len(bad) == 1


@pytest.mark.parametrize("line", [{"step": "1", "ticket": 2}, {"ticket": 2}, [], {"step": 1}])
def test_lines_without_step_or_ticket_are_no_samples(line: Any) -> None:
    bad: list[int] = []
    assert list(heads(lines(line), bad)) == []
    assert bad == [0]
