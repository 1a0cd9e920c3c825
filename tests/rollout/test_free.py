"""Engines that are cut where the learner is ready: nothing is lost, a replay has the same bits."""

import json
import random
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.lives import Life, shown
from postgrad.core.cursor import Cursor
from postgrad.core.errors import RunError, UsageError, WorkerLost
from postgrad.rollout.free import FILE, RecordedSchedule, Track

STEPS = 5
SECONDS = 2e-4
SHAPES = st.fixed_dictionaries(
    {
        "lengths": st.integers(0, 10_000),
        "staleness": st.integers(1, 3),
        "groups": st.integers(1, 3),
        "samples": st.integers(2, 3),
        "slots": st.integers(1, 6),
        "turns": st.integers(1, 2),
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
STEPS_OF_PROCESSES = st.sets(st.integers(0, STEPS))


@pytest.fixture(scope="module")
def thread() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1, "sampling") as executor:
        yield executor


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: Any) -> Callable[[list[Any]], RecordedSchedule]:
    """The schedule with these lines, read from a file."""
    path = tmp_path_factory.mktemp("recorded") / FILE

    def write(lines: list[Any]) -> RecordedSchedule:
        path.write_text("".join(json.dumps(line) + "\n" for line in lines), "utf-8")
        return RecordedSchedule(path.parent)

    return write


def seen(life: Life) -> Any:
    """What a step leaves: its groups, and every byte of what a checkpoint holds."""
    sampled = life.next()
    arrays = {name: array.tobytes() for name, array in life.pending.items()}
    return shown(sampled.all), sampled.reasons, sampled.metrics, life.cursor, life.ahead, arrays


def in_steps(life: Life, steps: int) -> None:
    for _ in range(steps):
        life.next()


def free(shape: Any, thread: ThreadPoolExecutor, order: int, **how: Any) -> Life:
    """A run whose workers and learner are as fast as `order` says."""
    return Life(
        **shape, free=True, thread=thread, order=random.Random(order), seconds=SECONDS, **how
    )


@pytest.mark.slow
@given(
    shape=SHAPES, order=st.integers(0, 10_000), resumed=STEPS_OF_PROCESSES, again=STEPS_OF_PROCESSES
)
@settings(max_examples=30, deadline=None)
def test_a_replay_has_the_same_bits_wherever_either_run_was_killed(
    shape: Any,
    order: int,
    resumed: set[int],
    again: set[int],
    thread: ThreadPoolExecutor,
    recorded: Any,
) -> None:
    first = free(shape, thread, order)
    steps = []
    for step in range(STEPS):
        steps.append(seen(first))
        if step in resumed:
            first.start()
    replay = free(shape, thread, order + 1, recorded=recorded(first.schedule))
    for step in range(STEPS):
        assert seen(replay) == steps[step]
        if step in again:
            replay.start()
    assert replay.schedule == first.schedule


@pytest.mark.slow
@given(shape=SHAPES, order=st.integers(0, 10_000), resumed=STEPS_OF_PROCESSES)
@settings(max_examples=25, deadline=None)
def test_no_token_is_too_old_and_each_ticket_is_in_one_step_or_open(
    shape: Any, order: int, resumed: set[int], thread: ThreadPoolExecutor
) -> None:
    life = free(shape, thread, order)
    settled: list[int] = []
    for step in range(STEPS):
        sampled = life.next()
        for rollout in (r for group in sampled.all for r in group.rollouts):
            assert all(0 <= step - v <= life.staleness for v, _ in rollout.versions)
            drawn = [
                int(token) // 100
                for turn in rollout.turns if turn.author == "policy" for token in turn.token_ids
            ]  # fmt: skip
            assert drawn == [v for v, tokens in rollout.versions for _ in range(tokens)]
        settled += [group.prompt.ticket for group in sampled.all]
        assert life.schedule[-1]["tickets"] == [group.prompt.ticket for group in sampled.all]
        assert (life.schedule[-1]["step"], life.schedule[-1]["version"]) == (step + 1, step)
        if step in resumed:
            life.start()
    begun = life.pending["tickets"][:, 0].tolist() if life.pending else []
    assert len({*settled, *begun}) == len(settled) + len(begun)
    if not life.rollout.get("curriculum"):
        assert sorted([*settled, *begun]) == list(range(len(settled) + len(begun)))
        assert life.cursor == Cursor(len(settled))


def test_the_engine_is_cut_within_a_long_answer_and_goes_on_to_the_same_end(
    thread: ThreadPoolExecutor,
) -> None:
    """Each worker has answers of 2 000 tokens for the second step; the learner is done before."""
    life = free({"lengths": 1, "staleness": 1, "workers": 2, "slots": 8}, thread, 0)
    begun = threading.Event()
    life.length = lambda ticket, sample, turn: 2_000 if ticket in (2, 3) else 1
    rested = life.rest

    def rest() -> None:
        begun.set()
        rested()

    life.rest = rest
    life.start()
    life.engine.version = 0
    life.source.next(1, life.cursor, {}, {})
    begun.clear()
    assert life.source.start_ahead()
    assert begun.wait(60.0)
    paused = life.source.pause()
    tracks = [Track.from_json(track) for track in paused.schedule["engines"]]
    assert all(1 <= track.decode_steps < 2_000 for track in tracks)
    assert paused.metrics["ahead/ended_groups"] == 0.0
    turns = paused.pending["turns"]
    assert {tuple(turn[[0, 2]]) for turn in turns} == {(2, 0), (3, 0)}  # neither has ended
    assert sum(track.response_tokens for track in tracks) == 2 * 3 + turns[:, 3].sum()


def test_every_worker_goes_on_while_the_learner_waits_for_another(
    thread: ThreadPoolExecutor,
) -> None:
    """With a fixed schedule the worker of tickets 1, 3 and 5 would stand still after 1 and 3."""
    life = free({"lengths": 1, "staleness": 2, "workers": 2, "slots": 2}, thread, 0)
    tokens = 3 * 3  # of three tickets with three samples of a token each

    def length(ticket: int, sample: int, turn: int) -> int:
        waits = life.engine._engines[1].stats.response_tokens < tokens
        return 1_000_000 if ticket == 0 and waits else 1

    life.length = length
    life.start()
    life.engine.version = 0
    sampled = life.source.next(1, life.cursor, {}, {})
    assert [group.prompt.ticket for group in sampled.all] == [0, 1]
    assert life.engine._engines[1].stats.response_tokens == tokens


def test_a_replay_says_where_it_does_otherwise(thread: ThreadPoolExecutor, recorded: Any) -> None:
    shape = {"lengths": 5, "staleness": 2, "groups": 2, "workers": 2}
    first = free(shape, thread, 0)
    for _ in range(3):
        first.next()
    lines = [dict(line) for line in first.schedule]
    replay = free({**shape, "lengths": 6}, thread, 0, recorded=recorded(lines))
    pattern = r"rollout worker \d wrote \d+ tokens in \d+ decode steps of"
    with pytest.raises(RunError, match=pattern):
        in_steps(replay, 3)
    short = free(shape, thread, 0, recorded=recorded(lines[:1]))
    short.next()
    with pytest.raises(RunError, match=r"has no step 2 \(its last is 1\)"):
        short.next()
    fewer = free({**shape, "workers": 1}, thread, 0, recorded=recorded(lines))
    with pytest.raises(UsageError, match="is of 2 rollout workers, and this run has 1"):
        fewer.next()


def test_a_worker_that_dies_loses_no_ticket_and_such_a_step_is_not_repeated(
    thread: ThreadPoolExecutor, recorded: Any
) -> None:
    shape = {"lengths": 5, "staleness": 2, "groups": 2, "workers": 3}
    life = free(shape, thread, 0, dies=lambda method, number: method == "turn" and number == 2)
    settled = [group.prompt.ticket for _ in range(3) for group in life.next().all]
    assert settled == list(range(6))
    assert life.engine.logs.of("engine_lost")
    lost = [track["lost"] for line in life.schedule for track in line["engines"]]
    assert lost.count(True) >= 1
    replay = free(shape, thread, 1, recorded=recorded(life.schedule))
    with pytest.raises(RunError, match=r"rollout worker 2 died in step \d, which cannot be"):
        in_steps(replay, 3)


def test_a_worker_that_dies_in_a_replay_restarts_the_run(
    thread: ThreadPoolExecutor, recorded: Any
) -> None:
    shape = {"lengths": 5, "staleness": 2, "groups": 2, "workers": 2}
    first = free(shape, thread, 0)
    in_steps(first, 3)
    replay = free(shape, thread, 1, recorded=recorded(first.schedule),
                  dies=lambda method, number: method == "turn" and number == 1)  # fmt: skip
    with pytest.raises(WorkerLost, match="a replay needs each of them"):
        in_steps(replay, 3)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "no file"),
        ("[]\n", "not a step of a schedule"),
        ('{"step": 1}\n', "not a step of a schedule"),
        ('{"step": -1, "engines": []}\n', "not a step of a schedule"),
        ('{"step": 1, "engines": [{"decode_steps": 3}]}\n', "an engine needs decode_steps"),
        (
            '{"step": 1, "engines": [{"decode_steps": 3, "response_tokens": 9, "lost": false, '
            '"arrivals": [[0, ["a"]]]}]}\n',
            "pairs of a decode step and a list of tickets",
        ),
    ],
)
def test_a_file_that_is_no_schedule_is_refused(text: str, why: str, tmp_path: Path) -> None:
    if text:
        (tmp_path / FILE).write_text(text, "utf-8")
    with pytest.raises(UsageError, match=why):
        RecordedSchedule(tmp_path)


def test_a_track_is_what_its_json_says() -> None:
    track = Track(57, 800, {0: (3, 4), 12: (9,)}, lost=True)
    assert Track.from_json(json.loads(json.dumps(track.to_json()))) == track
