"""The schedule of tickets: never older than its bound, nothing dropped, never stuck."""

from itertools import count

import pytest
from hypothesis import given
from hypothesis import strategies as st

from postgrad.core.cursor import Schedule


class Driven:
    """A run whose events come in any order: engine, learner and publisher are apart."""

    def __init__(self, groups: int, staleness: int) -> None:
        self.schedule = Schedule(groups, staleness)
        self.next_ticket = count()
        self.running: list[int] = []
        self.trained: list[dict[int, int]] = []
        self.filtered: list[int] = []

    def fill(self) -> None:
        while self.schedule.room:
            ticket = next(self.next_ticket)
            self.schedule.start(ticket)
            self.running.append(ticket)

    def possible(self) -> list[str]:
        """What can happen now, after all that may start has started."""
        events = ["end"] if self.running else []
        learning = self.schedule.taken > self.schedule.version
        events += ["publish"] if learning else []
        events += ["take"] if self.schedule.ready and not learning else []
        return events

    def happen(self, event: str, which: int, teaches: bool) -> None:
        if event == "end":
            ticket = self.running.pop(which % len(self.running))
            self.schedule.end(ticket)
            if not teaches:
                self.schedule.filter(ticket)
                self.filtered.append(ticket)
        elif event == "take":
            self.trained.append(self.schedule.take())
        else:
            self.schedule.publish()
        self.fill()


EVENTS = st.lists(st.tuples(st.integers(0, 99), st.integers(0, 99), st.booleans()), max_size=150)


@given(groups=st.integers(1, 4), staleness=st.integers(0, 5), events=EVENTS)
def test_no_order_of_events_makes_it_stale_or_stuck_or_loses_a_ticket(
    groups: int, staleness: int, events: list[tuple[int, int, bool]]
) -> None:
    run = Driven(groups, staleness)
    run.fill()
    for kind, which, teaches in events:
        possible = run.possible()
        assert possible, "nothing can happen any more"
        run.happen(possible[kind % len(possible)], which, teaches)
    assert all(0 <= age <= staleness for step in run.trained for age in step.values())
    assert all(len(step) == groups for step in run.trained)
    trained = [ticket for step in run.trained for ticket in step]
    assert trained == sorted(trained)  # in ticket order, whatever ended first
    begun = next(run.next_ticket)
    assert sorted([*trained, *run.filtered, *run.schedule.open]) == list(range(begun))


@given(groups=st.integers(1, 4), staleness=st.integers(0, 5), steps=st.integers(1, 12))
def test_in_one_process_a_step_begins_one_steps_tickets_and_all_reach_the_bound(
    groups: int, staleness: int, steps: int
) -> None:
    schedule, first = Schedule(groups, staleness), 0
    for step in range(steps):
        room = schedule.room
        assert room == groups * (1 + (staleness if step == 0 else 0))
        for ticket in range(first, first + room):
            schedule.start(ticket)
        first += room
        front = schedule.front
        assert front == tuple(range(step * groups, (step + 1) * groups))
        for ticket in front:
            schedule.end(ticket)
        assert schedule.take() == dict.fromkeys(front, min(step, staleness))
        schedule.publish()


@given(st.integers(1, 3), st.integers(1, 4), st.integers(0, 6))
def test_one_made_from_what_is_under_way_goes_on_as_the_one_before(
    groups: int, staleness: int, steps: int
) -> None:
    full_schedule, first = Schedule(groups, staleness), 0
    for _ in range(steps):
        for ticket in range(first, first := first + full_schedule.room):
            full_schedule.start(ticket)
        for ticket in full_schedule.front:
            full_schedule.end(ticket)
        full_schedule.take()
        full_schedule.publish()
    again = Schedule(groups, staleness, version=steps, begun=dict(full_schedule.open))
    assert (again.room, again.front, dict(again.open)) == (
        full_schedule.room,
        full_schedule.front,
        dict(full_schedule.open),
    )


def test_what_is_out_of_order_is_refused() -> None:
    schedule = Schedule(2, 0)
    schedule.start(3)
    with pytest.raises(ValueError, match="ticket 3 may not start"):
        schedule.start(3)
    schedule.start(4)
    with pytest.raises(ValueError, match="ticket 5 may not start: room for 0"):
        schedule.start(5)
    schedule.end(3)
    assert not schedule.ready
    with pytest.raises(ValueError, match=r"step 0 is not ready: \{4\} are open"):
        schedule.take()
    with pytest.raises(ValueError, match="not under way"):
        schedule.end(3)
    with pytest.raises(ValueError, match="no step that made it"):
        schedule.publish()
    with pytest.raises(ValueError, match="0 groups"):
        Schedule(0, 1)
