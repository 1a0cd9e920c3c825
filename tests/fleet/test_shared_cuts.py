"""An engine of several processes that is cut, or stopped by the clock: where, and what goes on."""

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Timer
from typing import Any

import pytest

from helpers.shared_engines import EVERY, bits, dies_in, names, new_weights, requests, tokens
from postgrad.core.errors import RunError, WorkerLost
from postgrad.fleet.shared import SharedEngine
from postgrad.rollout.engine import Completion, Request, generate

AWAITED = (0, 1, 2)  # tickets that are waited for before the others


def cut_when_awaited_have_ended(engine: SharedEngine) -> tuple[list[Completion], list[Request]]:
    """What has ended by then, and what goes on."""
    for request in requests(max_new_tokens=24):
        engine.submit(request)
    done: list[Completion] = []
    while len([c for c in done if c.ticket in AWAITED]) < 5 * len(AWAITED):
        done += engine.completed(AWAITED)
    left = engine.cut()
    while ended := engine.completed():
        done += ended
    return sorted(done, key=lambda c: (c.ticket, c.sample)), left


def written(left: list[Request]) -> list[Any]:
    return [
        (r.ticket, r.sample_ids, None if r.written is None else
         (r.written.token_ids.tobytes(), r.written.logprobs.tobytes(), r.written.versions))
        for r in left
    ]  # fmt: skip


@pytest.mark.parametrize("slow", [0, 1])
def test_where_a_cut_finds_each_process_does_not_depend_on_how_slow_the_others_are(
    shared: Any, slow: int
) -> None:
    done, left = cut_when_awaited_have_ended(shared(2).engine)
    assert names(done, left) == EVERY
    assert any(request.written is not None for request in left)
    assert [r.ticket for r in left] == sorted(r.ticket for r in left)
    late = shared(2)
    worker = late.workers[slow]
    turn = worker._worker.turn

    def slow_turn(*asked: Any) -> Any:
        time.sleep(0.02)
        return turn(*asked)

    worker._worker.turn = slow_turn
    late_done, late_left = cut_when_awaited_have_ended(late.engine)
    assert bits(late_done) == bits(done)
    assert written(late_left) == written(left)


@pytest.mark.slow
def test_samples_that_were_cut_in_all_processes_go_on_to_what_uncut_ones_are(
    shared: Any, undisturbed: Callable[..., list[Any]]
) -> None:
    expected = undisturbed(24)
    engine = shared(2).engine
    done, left = cut_when_awaited_have_ended(engine)
    assert engine.completed() == []
    assert engine.cut() == []
    done += generate(engine, left)
    assert sorted(tokens(done)) == expected


@pytest.mark.parametrize("method", ["cut", "turn"])
def test_a_process_that_dies_before_the_cut_loses_no_sample_and_takes_none_twice(
    shared: Any, method: str, undisturbed: Callable[..., list[Any]]
) -> None:
    expected = undisturbed(24)
    lossy = shared(2, {1: dies_in(method, 0 if method == "cut" else 1)})
    done, later = cut_and_gone_on(lossy.engine)
    assert sorted((c.ticket, c.sample) for c in done + later) == EVERY
    assert sorted(tokens(done + later)) == expected
    assert len(lossy.logs.of("engine_lost")) == 1


def until_halted(engine: SharedEngine, turns: int | None) -> tuple[list[Completion], list[Request]]:
    """What has ended by a cut, and what goes on. turns: after which the engine is stopped, while
    the next ones are under way; None: it stops by itself.
    """
    done: list[Completion] = []
    for request in requests(max_new_tokens=24):
        engine.submit(request)
    while completions := engine.completed():
        done += completions
        turns = None if turns is None else turns - 1
        if turns == 0:
            for member in engine._members:
                engine._ask(member)
            engine.stop()
    left = engine.cut()
    while ended := engine.completed():
        done += ended
    return sorted(done, key=lambda c: (c.ticket, c.sample)), left


@pytest.mark.slow
@pytest.mark.parametrize("turns", [1, 4, 9])
def test_an_engine_that_was_stopped_where_the_clock_said_is_repeated_to_the_same_token(
    shared: Any, turns: int, undisturbed: Callable[..., list[Any]]
) -> None:
    expected = undisturbed(24)
    first, again = shared(3).engine, shared(3)
    first.follow(None)
    done, left = until_halted(first, turns)
    assert names(done, left) == EVERY
    tracks = first.tracks()
    assert sum(track.response_tokens for track in tracks) == sum(
        len(c.token_ids) for c in done
    ) + sum(request.position for request in left)
    again.workers[1].held.clear()  # the others are far ahead of it
    again.engine.follow(tracks)
    Timer(0.2, again.workers[1].held.set).start()
    done_again, left_again = until_halted(again.engine, None)
    assert bits(done_again) == bits(done)
    assert written(left_again) == written(left)
    assert again.engine.tracks() == tracks
    assert sorted(tokens(done + generate(first, left))) == expected


def test_a_stop_that_comes_late_stops_nothing_of_the_next_step(shared: Any) -> None:
    late = shared(2)
    late.engine.follow(None)
    until_halted(late.engine, 2)
    stopped = late.engine._followed.number
    late.engine.follow(None)
    for workers in late.workers:
        workers.aside("stop", stopped).result()
    assert names(generate(late.engine, requests()), []) == EVERY


def cut_and_gone_on(engine: SharedEngine) -> tuple[list[Completion], list[Completion]]:
    done, left = cut_when_awaited_have_ended(engine)
    return done, generate(engine, left)


def in_thread(call: Callable[[], Any]) -> Any:
    """Its result in another thread than the one that publishes."""
    with ThreadPoolExecutor(1) as executor:
        return executor.submit(call).result()


class Untouched:
    """A policy that learns: nobody may ask it anything."""

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"the policy was asked for its {name} while it learns")


def test_a_process_that_dies_beside_the_learner_leaves_its_samples_to_the_others_until_a_publish(
    shared: Any,
    undisturbed: Callable[..., list[Any]],
) -> None:
    expected = undisturbed(24)
    lossy = shared(2, {1: dies_in("turn", 1)})
    weights = new_weights(lossy)
    lossy.publish(weights, 1)
    lossy.launcher.policy = Untouched()
    done, left = in_thread(lambda: cut_when_awaited_have_ended(lossy.engine))
    assert names(done, left) == EVERY
    lossy.publish(weights, 2)
    joined = lossy.engine._members[1]
    while joined.starting is not None:
        lossy.engine._join(needed=True)
        time.sleep(0.01)
    later = generate(lossy.engine, left)
    assert sorted(tokens(done + later)) == expected
    spans = {version for c in later for version, _ in c.versions}
    assert spans <= {1, 2}
    assert joined.serves


def test_the_only_process_that_dies_beside_the_learner_ends_the_run(shared: Any) -> None:
    lossy = shared(1, {0: dies_in("turn", 1)})
    lossy.publish(new_weights(lossy), 1)
    lossy.launcher.policy = Untouched()
    with pytest.raises(WorkerLost, match="no rollout worker is left that has the policy"):
        in_thread(lambda: cut_when_awaited_have_ended(lossy.engine))


def test_an_engine_that_is_closed_ends_the_waiting_for_its_samples(shared: Any) -> None:
    busy = shared(1)
    busy.workers[0].held.clear()
    busy.engine.submit(requests()[0])
    with ThreadPoolExecutor(1) as executor:
        waiting = executor.submit(busy.engine.completed)
        while busy.engine._members[0].asked is None:
            time.sleep(0.001)
        busy.engine.close()
        busy.workers[0].held.set()
        with pytest.raises(RunError, match="rollout workers have ended"):
            waiting.result()
    assert busy.logs.of("engine_lost") == []
