"""Processes of an engine that come later, leave and come back."""

from collections.abc import Callable
from concurrent.futures import wait
from dataclasses import replace
from random import Random
from threading import Event
from typing import Any

import pytest

from helpers.fake_workers import Dies
from helpers.shared_engines import (
    bits,
    dies_in,
    new_weights,
    requests,
    tokens,
)
from postgrad.core.errors import RunError
from postgrad.rollout.engine import generate


def started(shared: Any, number: int) -> None:
    """There is room for a process now, and it has been started."""
    starting = shared.engine._members[number].starting
    shared.room[number].set()
    assert not wait([starting], 60.0).not_done


def tickets_of(shared: Any) -> dict[int, float]:
    """How many tokens each process has written since the last report."""
    statistics = shared.engine.stats.by_engine()  # which has no row of those that have not come
    return {
        n: statistics[f"engine/{n}/response_tokens"]
        for n in range(9)
        if f"engine/{n}/losses" in statistics
    }


@pytest.mark.slow
def test_a_process_that_comes_later_joins_at_a_publish_and_samples_from_then_on(
    shared: Any,
) -> None:
    growing, complete = shared(1, more=2), shared(2)
    weights = [(n, t + 0.01) for n, t in new_weights(growing)]
    growing.publish(weights, 1)
    alone = tokens(generate(growing.engine, requests()))
    assert growing.engine.stats.by_engine()["engine/serving"] == 1.0
    started(growing, 1)
    assert tokens(generate(growing.engine, requests())) == alone
    assert list(tickets_of(growing)) == [0]  # it has no weights yet
    assert growing.logs.events == []
    for each in (growing, complete):
        each.publish(weights, 2)
    (joined,) = growing.logs.of("engine_joined")
    assert (joined["engine"], joined["version"], joined["serving"]) == (1, 2, 2)
    done = generate(growing.engine, requests())
    assert bits(done) == bits(generate(complete.engine, requests()))
    assert tokens(done) == alone
    tickets = tickets_of(growing)
    assert tickets == tickets_of(complete)
    assert min(tickets.values()) > 0.0


@pytest.mark.slow
def test_a_process_whose_place_is_gone_leaves_and_comes_back_at_a_publish(shared: Any) -> None:
    shrinking, intact = shared(2, {1: dies_in("turn", 1)}), shared(2)
    weights = [(n, t + 0.01) for n, t in new_weights(intact)]
    for each in (shrinking, intact):
        each.publish(weights, 1)
    expected = generate(intact.engine, requests())
    shrinking.room[1].clear()
    assert tokens(generate(shrinking.engine, requests())) == tokens(expected)
    (lost,), (left,) = shrinking.logs.of("engine_lost"), shrinking.logs.of("engine_left")
    assert (lost["engine"], left["engine"]) == (1, 1)
    assert (left["returns"], left["serving"], left["losses"]) == (True, 1, 1)
    assert "no machine of the cluster had room for it; it leaves until" in left["message"]
    assert left["samples"] == lost["samples"] > 0
    started(shrinking, 1)
    assert tokens(generate(shrinking.engine, requests())) == tokens(expected)
    assert shrinking.logs.of("engine_joined") == []
    for each in (shrinking, intact):
        each.publish(weights, 2)
    assert [event["engine"] for event in shrinking.logs.of("engine_joined")] == [1]
    assert bits(generate(shrinking.engine, requests())) == bits(generate(intact.engine, requests()))


def test_samples_wait_for_a_place_only_where_nobody_else_could_write_them(shared: Any) -> None:
    """Before, they waited cluster.start_seconds for the lost machine while others served."""
    pair, alone = (shared(size, {0: dies_in("turn", 1)}) for size in (2, 1))
    for lossy in (pair, alone):
        lossy.launcher.patience.clear()
        assert len(generate(lossy.engine, requests())) == 35
    assert pair.launcher.patience == [(0, 0.0)]
    assert alone.launcher.patience == [(0, alone.launcher.recipe.cluster.start_seconds)]


def test_where_processes_may_come_later_samples_of_a_lost_one_go_on_at_once(
    shared: Any, undisturbed: Callable[..., list[Any]]
) -> None:
    """They do not wait for its replacement, which repeats a lost one's turns elsewhere."""
    starts = Event()
    later: Dies = lambda method, number: method == "start" and not starts.wait(60.0)  # noqa: E731
    expected = undisturbed()
    never: Dies = lambda method, number: False  # noqa: E731
    growing = shared(2, {0: never, 1: dies_in("turn", 1)}, more=1, later=later)
    try:
        assert tokens(generate(growing.engine, requests())) == expected
        assert len(growing.logs.of("engine_lost")) == 1
        assert growing.logs.of("engine_joined") == []
    finally:
        starts.set()


@pytest.mark.slow
@pytest.mark.parametrize("proved", [False, True])
def test_a_process_that_waits_for_a_publish_is_called_in_where_the_last_other_has_ended(
    shared: Any, proved: bool
) -> None:
    """Before, the run ended though a process was there."""
    expected, growing = shared(1), shared(1, {0: dies_in("turn", 1)}, more=1, most=0)
    weights = [(n, t + 0.01) for n, t in new_weights(growing)]
    for each in (expected, growing):
        each.publish(weights, 3)
        if proved:
            each.engine.logprobs([request.token_ids for request in requests()], 1.0)
    started(growing, 1)
    if proved:  # it is up, and not only started
        growing.engine.sleep()
    assert tokens(generate(growing.engine, requests())) == tokens(
        done := generate(expected.engine, requests())
    )
    assert {version for c in done for version, _ in c.versions} == {3}
    (left,), (joined,) = growing.logs.of("engine_left"), growing.logs.of("engine_joined")
    assert (left["engine"], left["returns"], joined["engine"]) == (0, False, 1)
    assert (joined["version"], joined["serving"]) == (3, 1)
    assert growing.launcher.policy.offloads == 1  # when the one that joined had its weights
    assert growing.engine.stats.by_engine()["engine/1/response_tokens"] > 0.0


def test_a_run_ends_where_the_process_that_was_called_in_dies_too(shared: Any) -> None:
    dying: Dies = lambda method, number: (method, number) == ("turn", 1)  # noqa: E731
    growing = shared(1, {0: dying, 1: dying}, more=1, most=0)
    growing.publish(new_weights(growing), 1)
    started(growing, 1)
    with pytest.raises(RunError, match=r"max_restarts = 0: .* there is no other rollout worker"):
        generate(growing.engine, requests())
    assert [event["engine"] for event in growing.logs.of("engine_left")] == [0]


def test_the_only_process_does_not_leave_and_ends_the_run_where_its_place_stays_away(
    shared: Any,
) -> None:
    alone = shared(1, {0: dies_in("turn", 1)}, more=1, most=1)
    alone.room[0].clear()
    with pytest.raises(RunError, match=r"had room for it; cluster\.max_restarts = 1: .* no other"):
        generate(alone.engine, requests())
    assert alone.logs.of("engine_left") == []


def test_a_process_that_comes_later_and_cannot_start_leaves_without_having_joined(
    shared: Any,
) -> None:
    fails: Dies = lambda method, number: method == "start"  # noqa: E731
    growing = shared(1, {0: lambda m, n: False}, more=1, most=1, later=fails)
    weights = new_weights(growing)
    growing.room[1].set()
    for version in range(1, 100):
        growing.publish(weights, version)
        if growing.logs.of("engine_left"):
            break
        wait([growing.engine._members[1].starting])
    (left,) = growing.logs.of("engine_left")
    assert (left["engine"], left["returns"], left["samples"]) == (1, False, 0)
    assert len(growing.logs.of("engine_lost")) == 1
    assert len(generate(growing.engine, requests())) == 35


def test_nobody_waits_for_a_place_once_the_engine_is_closed(shared: Any) -> None:
    growing = shared(1, more=1)
    starting = growing.engine._members[1].starting
    growing.engine.close()
    assert not wait([starting], 60.0).not_done


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
def test_whoever_comes_and_goes_every_ticket_is_sampled_once_with_the_same_tokens(
    shared: Any, seed: int
) -> None:
    """Processes die, lose their places and get them back at random moments of four steps."""
    random = Random(seed)
    dies: Dies = lambda method, number: method == "turn" and random.random() < 0.04  # noqa: E731
    moving, alone = (
        shared(2, dict.fromkeys(range(1, 4), dies), more=2, later=dies, most=99),
        shared(1),
    )
    weights = new_weights(alone)
    for step in range(4):
        for each in (moving, alone):
            each.publish([(n, t + 0.01 * step) for n, t in weights], step)
        for number in random.sample(range(1, 4), 2):
            place = moving.room[number]
            place.clear() if place.is_set() else place.set()
        asked = [replace(request, ticket=7 * step + request.ticket) for request in requests()]
        done = generate(moving.engine, asked)
        assert tokens(done) == tokens(generate(alone.engine, asked))
        assert all(c.versions == ((step, len(c.token_ids)),) for c in done)
    kinds = {event["event"] for event in moving.logs.events}
    assert {"engine_joined"} <= kinds
