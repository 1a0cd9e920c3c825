"""Samples that a thread draws while the policy learns: the same groups whoever is faster."""

import random
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.lives import Inline, Life, shown
from postgrad.core.cursor import Cursor
from postgrad.core.errors import RunError
from postgrad.rollout.ahead import Progress, sampling_thread

STEPS = 5
SHAPES = st.fixed_dictionaries(
    {
        "lengths": st.integers(0, 10_000),
        "staleness": st.integers(1, 3),
        "groups": st.integers(1, 3),
        "samples": st.integers(2, 3),
        "slots": st.integers(1, 6),
        "turns": st.integers(1, 2),
        "in_flight": st.booleans(),
        "workers": st.integers(1, 3),
        "scores_ahead": st.booleans(),
        "rollout": st.sampled_from(
            [
                {},
                {"dynamic_sampling": True, "max_rounds": 2},
                {"dynamic_sampling": True, "max_rounds": 6},
                {"curriculum": {"retire_at": 0.6, "revisit_epochs": 1}},
            ]
        ),
    }
)


@pytest.fixture(scope="module")
def thread() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1, "sampling") as executor:
        yield executor


def seen(life: Life) -> Any:
    """What a step leaves: its groups, and every byte of what a checkpoint holds."""
    sampled = life.next()
    arrays = {name: array.tobytes() for name, array in life.pending.items()}
    return shown(sampled.all), sampled.reasons, sampled.metrics, life.cursor, life.ahead, arrays


@pytest.mark.slow
@given(shape=SHAPES, order=st.integers(0, 10_000))
@settings(max_examples=40, deadline=None)
def test_neither_the_workers_nor_the_learners_pace_changes_what_is_drawn(
    shape: Any, order: int, thread: ThreadPoolExecutor
) -> None:
    alone = Life(**shape, thread=Inline())
    beside = Life(**shape, thread=thread, order=random.Random(order), seconds=3e-4)
    for _ in range(STEPS):
        assert seen(alone) == seen(beside)


@pytest.mark.slow
@given(shape=SHAPES, order=st.integers(0, 10_000), resumed_after=st.sets(st.integers(0, STEPS)))
@settings(max_examples=40, deadline=None)
def test_a_run_that_is_resumed_after_any_steps_draws_the_same_samples(
    shape: Any, order: int, resumed_after: set[int]
) -> None:
    uninterrupted = Life(**shape, thread=Inline())
    pieces = Life(**shape, thread=Inline(), order=random.Random(order))
    for step in range(STEPS):
        assert seen(uninterrupted) == seen(pieces)
        if step in resumed_after:
            pieces.start()


@given(shape=SHAPES)
@settings(max_examples=40, deadline=None)
def test_no_token_is_too_old_and_each_ticket_is_in_one_step_or_open(shape: Any) -> None:
    life = Life(**shape, thread=Inline())
    settled: list[int] = []
    for step in range(STEPS):
        sampled = life.next()
        for rollout in (r for group in sampled.all for r in group.rollouts):
            assert all(0 <= step - v <= life.staleness for v, _ in rollout.versions)
            written = [t for t in rollout.turns if t.author == "policy"]
            lengths = [life.length(rollout.ticket, rollout.sample, t) for t in range(life.turns)]
            assert [len(turn.token_ids) for turn in written] == lengths
            drawn = [int(token) // 100 for turn in written for token in turn.token_ids]
            assert drawn == [v for v, tokens in rollout.versions for _ in range(tokens)]
            if not life.in_flight:
                assert len(rollout.versions) == 1
        settled += [group.prompt.ticket for group in sampled.all]
    begun = life.pending["tickets"][:, 0].tolist() if life.pending else []
    assert len({*settled, *begun}) == len(settled) + len(begun)
    assert Cursor().settle(settled).settled <= life.cursor.settled
    if not life.rollout.get("curriculum"):
        assert sorted([*settled, *begun]) == list(range(len(settled) + len(begun)))
        assert life.cursor == Cursor(len(settled))


def test_the_groups_of_the_next_step_have_ended_when_the_weights_come() -> None:
    life = Life(3, 1, groups=3, workers=2, thread=Inline())
    for step in range(6):
        sampled = life.next()
        assert life.ahead["ahead/ended_groups"] == 3.0
        ages = {step - v for g in sampled.all for r in g.rollouts for v, _ in r.versions}
        assert ages == ({1} if step else {0})


def test_a_group_is_scored_once_and_beside_the_learner_where_scores_may_be_asked_then() -> None:
    for scores_ahead, first in ((True, 4), (False, 2)):
        life = Life(3, 1, workers=2, thread=Inline(), scores_ahead=scores_ahead)
        life.next()
        assert len({ticket for ticket, _ in life.scored}) == first
        for _ in range(4):
            life.next()
        assert len(life.scored) == len(set(life.scored))


def test_progress_of_samples_beside_the_learner_is_shown_when_they_are_waited_for() -> None:
    counted: list[int] = []
    progress = Progress(counted.append)
    progress.count(3)
    progress.count(2)
    assert counted == []
    with progress.shown():
        progress.count(1)
    progress.count(7)
    assert counted == [5, 1]


def test_an_error_of_the_thread_is_raised_where_it_is_waited_for(
    thread: ThreadPoolExecutor,
) -> None:
    life = Life(3, 1, groups=2, workers=1, thread=thread)
    life.next()

    def failing(ticket: int, sample: int) -> float:
        raise RunError(f"ticket {ticket} cannot be scored")

    life.source._live._sampler._scorer._reward = failing
    sampled = life.source.next(2, life.cursor, life.state, life.pending)
    assert len(sampled.groups) == 2
    assert life.source.start_ahead()
    with pytest.raises(RunError, match="cannot be scored"):
        life.source.pause()


def test_the_thread_ends_with_its_stack_though_it_waits_for_scores() -> None:
    halted, waiting = threading.Event(), threading.Event()

    def wait_for_scores() -> None:
        waiting.set()
        assert halted.wait(60.0)
        raise RunError("scoring was ended")

    with ExitStack() as stack:
        thread = sampling_thread(stack, halted.set)
        under_way = thread.submit(wait_for_scores)
        assert waiting.wait(60.0)
    assert isinstance(under_way.exception(), RunError)
    with pytest.raises(RuntimeError, match="after shutdown"):
        thread.submit(print)
