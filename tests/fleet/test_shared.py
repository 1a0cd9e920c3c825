"""An engine of several processes, without Ray: what is sampled where, and what a loss changes."""

import re
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import replace
from math import inf
from pathlib import Path
from random import Random
from threading import Event, Lock, Timer
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from helpers.fake_ranks import FakeLogs, FakeSite, SendingRanks
from helpers.fake_vllm import fake_vllm
from helpers.fake_workers import Dies, FakeWorkers
from postgrad.cluster.connection import NoPlace
from postgrad.core.errors import RunError, WorkerLost
from postgrad.fleet.engines import EngineWorker
from postgrad.fleet.members import EngineSite
from postgrad.fleet.remote import RankedWeights
from postgrad.fleet.shared import SharedEngine
from postgrad.rollout.engine import Completion, Request, WeightHandover, generate
from postgrad.rollout.settings import SamplingSettings

LOADING = Lock()  # transformers loads one model at a time in a process


class FakePolicy:
    """A policy at some update with fixed weights."""

    def __init__(self, weights: list[tuple[str, torch.Tensor]]) -> None:
        self.updates = 0
        self.rests = 0  # how often it left its devices once more
        self.weights = weights

    def rest(self) -> None:
        self.rests += 1

    def hub_weights(self) -> RankedWeights:
        return RankedWeights(SendingRanks(self.weights), "policy")


class Shared:
    """A shared engine over fake processes, and what became of it."""

    def __init__(
        self, recipe: Any, path: str, folder: Path, size: int, dies: dict[int, Dies], **how: Any
    ) -> None:
        """dies: by process, for its first life; `later` for all of its later ones. more: how many
        processes come when there is room for them.
        """
        site = FakeSite.of(recipe)
        more = how.pop("more", 0)
        self.room = room = [Event() for _ in range(size + more)]  # set: its place is there
        for place in room[:size]:
            place.set()
        later: Dies = how.pop("later", lambda method, number: False)
        first: dict[int, Any] = how.pop("first", {})  # recipes of first lives
        lives: dict[int, int] = {}

        class Site(EngineSite):
            patience: ClassVar[list[tuple[int, float]]] = []  # of each start: its number, seconds

            def has_place(self, number: int) -> bool:
                return room[number].is_set()

            def start(self, number: int, seconds: float) -> Any:
                self.patience.append((number, seconds))
                while not room[number].wait(0.01 if seconds == inf else 0.0):
                    if seconds < inf or self.closed.is_set():
                        raise NoPlace("no machine of the cluster had room for it")
                lives[number] = lives.get(number, 0) + 1
                kills = dies.get(number, later) if lives[number] == 1 else later
                if kills("start", lives[number]):
                    raise RunError("1 of 1 rollout workers did not start")
                own = first.get(number, recipe) if lives[number] == 1 else recipe
                worker = EngineWorker(own.dump(), site.choices)
                with LOADING:
                    worker.build(path, self.choices, 8, 32, str(folder))
                return FakeWorkers(worker, kills)

        self.logs = FakeLogs()
        self.policy: Any = None
        logs: Any = self.logs
        reservation: Any = None
        self.site = Site(
            recipe, site.choices, reservation, None, logs, folder, path, 8, 32
        )  # fmt: skip
        members = [self.site.start(number, 0.0) for number in range(size)]
        dtype = str(site.choices.rollout_dtype)
        how = {"exact": True, "most": 3, "later": more, **how}
        self.workers = members
        self.engine = SharedEngine(self.site, members, dtype, **how)

    def publish(self, weights: list[tuple[str, torch.Tensor]], version: int) -> None:
        policy: Any = FakePolicy(weights)
        policy.updates = version
        self.site.policy = policy
        self.engine.load_weights(WeightHandover(policy.hub_weights()), version)


@pytest.fixture
def shared(make_recipe: Any, models: Any, tmp_path: Path) -> Any:
    """shared(size, {number: dies}, **how)"""
    started: list[Shared] = []

    def start(size: int, dies: dict[int, Dies] | None = None, **how: Any) -> Shared:
        recipe = make_recipe("rl", model={"dtype": "float32"})
        started.append(Shared(recipe, models(0), tmp_path, size, dies or {}, **how))
        return started[-1]

    yield start
    for each in started:
        each.engine.close()


def requests(count: int = 7, samples: int = 5, **sampling: Any) -> list[Request]:
    settings = SamplingSettings(**{"max_new_tokens": 12, **sampling})
    drawn = np.random.default_rng(3)
    return [
        Request(ticket, tuple(range(samples)), drawn.integers(2, 9, 5).astype(np.int32), settings)
        for ticket in range(count)
    ]


@pytest.fixture(scope="session")
def sampled() -> dict[int, list[Any]]:
    """What `undisturbed` has sampled so far."""
    return {}


@pytest.fixture
def undisturbed(shared: Any, sampled: dict[int, list[Any]]) -> Callable[..., list[Any]]:
    """undisturbed(max_new_tokens=12): the tokens that `requests` get where nothing happens; an
    engine of one process has sampled them, once for all tests.
    """

    def of(most: int = 12) -> list[Any]:
        if most not in sampled:
            sampled[most] = tokens(generate(shared(1).engine, requests(max_new_tokens=most)))
        return sampled[most]

    return of


@pytest.fixture(scope="session")
def sampled_turns() -> list[Any]:
    """The bits of second turns in two processes that live: at most one list of them."""
    return []


def bits(completions: list[Completion]) -> list[Any]:
    return [
        (c.ticket, c.sample, c.turn, c.token_ids.tobytes(), c.logprobs.tobytes(), c.versions)
        for c in completions
    ]


def tokens(completions: list[Completion]) -> list[Any]:
    return [(c.ticket, c.sample, c.token_ids.tolist()) for c in completions]


def dies_in(method: str, number: int) -> Dies:
    return lambda called, before: (called, before) == (method, number)


def with_second_turns(engine: SharedEngine) -> list[Completion]:
    """Every first turn is followed by a second one, submitted as soon as it has ended."""
    first = requests()
    for request in first:
        engine.submit(request)
    done: list[Completion] = []
    while completions := engine.completed():
        done += completions
        for completion in completions:
            if not completion.turn:
                request = first[completion.ticket]
                prefix = np.concatenate([request.token_ids, completion.token_ids])
                engine.submit(
                    Request(completion.ticket, (completion.sample,), prefix, request.sampling, 1)
                )
    return sorted(done, key=lambda c: (c.ticket, c.sample, c.turn))


@pytest.mark.slow
def test_a_process_that_is_slow_holds_up_nobody_and_changes_no_bit(shared: Any) -> None:
    """Before, all processes waited for each other after every completion."""
    together = bits(generate(shared(3).engine, requests()))
    late = shared(3)
    late.workers[1].held.clear()
    for request in requests():
        late.engine.submit(request)
    done: list[Completion] = []
    while len(done) < 5 * 5:  # the tickets 0, 2, 3, 5 and 6
        done += late.engine.completed()
    assert {completion.ticket for completion in done} == {0, 2, 3, 5, 6}
    late.workers[1].held.set()
    done += generate(late.engine, [])
    done.sort(key=lambda c: (c.ticket, c.sample, c.turn))
    assert bits(done) == together


@pytest.mark.parametrize("turn", [0, 1, 3])
def test_a_process_that_dies_is_replaced_alone_with_the_same_bits(
    shared: Any, turn: int, sampled_turns: list[Any]
) -> None:
    if not sampled_turns:
        sampled_turns.append(bits(with_second_turns(shared(2).engine)))
    lossy = shared(2, {1: dies_in("turn", turn)})
    assert bits(with_second_turns(lossy.engine)) == sampled_turns[0]
    (lost,), (joined,) = lossy.logs.of("engine_lost"), lossy.logs.of("engine_joined")
    assert (lost["engine"], joined["engine"]) == (1, 1)
    assert set(lost["tickets"]) <= {1, 3, 5}
    assert lossy.workers[0].dead is False
    assert lossy.engine.stats.by_engine()["engine/1/losses"] == 1.0


def test_what_has_no_bits_to_keep_is_asked_of_the_others_from_its_beginning(
    shared: Any, undisturbed: Callable[..., list[Any]]
) -> None:
    expected = undisturbed()
    lossy = shared(2, {1: dies_in("turn", 2)}, exact=False)
    assert tokens(generate(lossy.engine, requests())) == expected
    assert len(lossy.logs.of("engine_lost")) == 1


def test_the_only_process_is_replaced_and_asked_again(
    shared: Any, undisturbed: Callable[..., list[Any]]
) -> None:
    expected = undisturbed()
    for exact in (True, False):
        lossy = shared(1, {0: dies_in("turn", 1)}, exact=exact)
        assert tokens(generate(lossy.engine, requests())) == expected


def test_a_replaced_process_has_the_policys_weights_and_is_proved(shared: Any) -> None:
    def published(lossy: Any) -> list[Any]:
        weights = [(n, t + 0.01) for n, t in new_weights(lossy)]
        lossy.publish(weights, 4)
        lossy.engine.logprobs([request.token_ids for request in requests()], 1.0)
        return bits(generate(lossy.engine, requests()))

    expected = published(shared(2))
    lossy = shared(2, {0: dies_in("turn", 1)})
    assert published(lossy) == expected
    assert {version for *_, versions in expected for version, _ in versions} == {4}
    assert lossy.logs.of("engine_joined")[0]["version"] == 4


def new_weights(shared: Any) -> list[tuple[str, torch.Tensor]]:
    return [
        (name, tensor.detach().clone())
        for name, tensor in shared.workers[0]._worker._engine._lm.named_parameters()
    ]


def test_other_weights_than_those_of_the_others_are_never_taken_in(shared: Any) -> None:
    lossy = shared(2, {0: dies_in("turn", 1)}, most=1)
    weights = [(n, t + 0.01) for n, t in new_weights(lossy)]
    lossy.publish(weights, 4)
    lossy.engine.logprobs([request.token_ids for request in requests()], 1.0)
    lossy.site.policy.weights = [(n, t + 0.05) for n, t in weights]
    done = generate(lossy.engine, requests())
    assert len(done) == 35
    assert lossy.logs.of("engine_joined") == []
    (left,) = lossy.logs.of("engine_left")
    assert "does not have the weights of" in left["message"]


@pytest.mark.parametrize("method", ["places", "begin", "take", "commit"])
def test_a_death_in_the_middle_of_a_publish_leaves_nobody_with_half_of_it(
    shared: Any, method: str
) -> None:
    lossy = shared(2, {1: dies_in(method, 0)})
    weights = [(n, t + 0.01) for n, t in new_weights(lossy)]
    lossy.publish(weights, 2)
    assert len(lossy.engine.logprobs([requests()[0].token_ids], 1.0)) == 1
    done = generate(lossy.engine, requests())
    assert all(c.versions == ((2, len(c.token_ids)),) for c in done)
    assert len(done) == 35
    assert len(lossy.logs.of("engine_lost")) == 1
    assert len(lossy.logs.of("engine_joined")) == 1


def test_a_publish_whose_source_fails_ends_everywhere_and_nobody_samples(shared: Any) -> None:
    whole = shared(2)

    def broken() -> Iterator[tuple[str, torch.Tensor]]:
        yield new_weights(whole)[0]
        raise RunError("the ranks are gone")

    broken_off = RankedWeights(SendingRanks(broken()), "policy")
    with pytest.raises(RunError, match="the ranks are gone"):
        whole.engine.load_weights(WeightHandover(broken_off), 1)
    with pytest.raises(RunError, match="a publish to the rollout engine broke off"):
        whole.engine.logprobs([requests()[0].token_ids], 1.0)


def interrupted(lossy: Any) -> None:
    """Requests are under way, of which some have been answered."""
    for request in requests():
        lossy.engine.submit(request)
    assert lossy.engine.completed()


def published_again(lossy: Any, weights: list[tuple[str, torch.Tensor]]) -> list[Any]:
    """What a paused engine samples once the restarted ranks have published."""
    lossy.engine.go_on(None)
    lossy.publish(weights, 2)
    return bits(generate(lossy.engine, requests()))


def test_an_engine_waits_while_ranks_are_restarted_and_then_samples_as_if_it_were_new(
    shared: Any,
) -> None:
    fresh, paused = shared(2), shared(2)
    weights = [(n, t + 0.01) for n, t in new_weights(fresh)]
    paused.publish([(n, t + 0.05) for n, t in weights], 5)
    interrupted(paused)
    paused.engine.interrupt()
    with pytest.raises(RunError, match="nobody waits for the rollout workers any more"):
        paused.engine.completed()
    assert paused.engine.pause(paused.logs)
    assert published_again(paused, weights) == published_again(fresh, weights)
    assert [workers.dead for workers in paused.workers] == [False, False]
    assert paused.logs.events == []


@pytest.mark.slow
def test_a_process_that_is_lost_while_ranks_are_restarted_joins_with_their_weights(
    shared: Any,
) -> None:
    fresh, paused = shared(2), shared(2)
    weights = [(n, t + 0.01) for n, t in new_weights(fresh)]
    paused.publish([(n, t + 0.05) for n, t in weights], 5)
    interrupted(paused)
    paused.workers[1].close()
    assert paused.engine.pause(paused.logs)
    assert len(paused.engine.logprobs([requests()[0].token_ids], 1.0)) == 1
    wait([paused.engine._members[1].starting])
    assert published_again(paused, weights) == published_again(fresh, weights)
    assert [event["engine"] for event in paused.logs.of("engine_lost")] == [1]
    assert paused.workers[0].dead is False


def test_an_engine_without_any_process_that_has_weights_does_not_wait(shared: Any) -> None:
    paused = shared(1, later=lambda method, lives: method == "start" and lives > 1)
    paused.publish(new_weights(paused), 1)
    interrupted(paused)
    paused.workers[0].close()
    assert not paused.engine.pause(paused.logs)


@pytest.mark.slow
def test_a_process_whose_weights_are_gone_waits_for_the_next_publish(shared: Any) -> None:
    lossy = shared(2, {0: dies_in("turn", 1)})
    weights = [(n, t + 0.01) for n, t in new_weights(lossy)]
    lossy.publish(weights, 4)
    lossy.site.policy.updates = 5  # it has learned
    expected = shared(1)
    expected.publish(weights, 4)
    again = tokens(generate(expected.engine, requests()))
    assert tokens(generate(lossy.engine, requests())) == again
    lossy.publish(weights, 5)
    done = generate(lossy.engine, requests())
    assert all(c.versions == ((5, len(c.token_ids)),) for c in done)
    assert not lossy.engine._members[0].absent


def test_weights_that_come_between_two_tokens_are_named_though_a_process_dies(
    shared: Any,
) -> None:
    lossy = shared(2, {1: dies_in("turn", 2)})
    for request in requests():
        lossy.engine.submit(request)
    done: list[Completion] = []
    while not done:
        done += lossy.engine.completed()
    lossy.publish([(n, t + 0.01) for n, t in new_weights(lossy)], 1)
    done += generate(lossy.engine, [])
    assert sorted((c.ticket, c.sample) for c in done) == [
        (t, s) for t in range(7) for s in range(5)
    ]
    assert all(sum(count for _, count in c.versions) == len(c.token_ids) for c in done)
    assert {version for c in done for version, _ in c.versions} == {0, 1}


@pytest.mark.slow
def test_a_process_that_dies_every_time_leaves_and_the_last_one_ends_the_run(shared: Any) -> None:
    dying: Dies = lambda method, number: method in ("turn", "repeat")  # noqa: E731
    lossy = shared(2, {0: dying, 1: lambda method, number: False}, later=dying, most=2)
    assert len(generate(lossy.engine, requests())) == 35
    assert len(lossy.logs.of("engine_lost")) == 2
    (left,) = lossy.logs.of("engine_left")
    assert left["engine"] == 0
    alone = shared(1, {0: dying}, later=dying, most=2)
    with pytest.raises(RunError, match=r"cluster\.max_restarts = 2: .* no other rollout worker"):
        generate(alone.engine, requests())


def test_a_process_that_cannot_be_started_again_leaves_its_tickets_to_the_others(
    shared: Any,
    undisturbed: Callable[..., list[Any]],
) -> None:
    absent: Dies = lambda method, number: method == "start"  # noqa: E731
    expected = undisturbed()
    lossy = shared(2, {0: dies_in("turn", 1), 1: lambda m, n: False}, later=absent, most=1)
    assert tokens(generate(lossy.engine, requests())) == expected
    assert len(lossy.logs.of("engine_left")) == 1
    assert tokens(generate(lossy.engine, requests())) == expected


def started(shared: Any, number: int) -> None:
    """There is room for a process now, and it has been started."""
    starting = shared.engine._members[number].starting
    shared.room[number].set()
    assert not wait([starting], 60.0).not_done


def tickets_of(shared: Any) -> dict[int, float]:
    """How many tokens each process has written since the last report."""
    told = shared.engine.stats.by_engine()  # which has no row of those that have not come
    return {
        n: told[f"engine/{n}/response_tokens"] for n in range(9) if f"engine/{n}/losses" in told
    }


@pytest.mark.slow
def test_a_process_that_comes_later_joins_at_a_publish_and_samples_from_then_on(
    shared: Any,
) -> None:
    growing, whole = shared(1, more=2), shared(2)
    weights = [(n, t + 0.01) for n, t in new_weights(growing)]
    growing.publish(weights, 1)
    alone = tokens(generate(growing.engine, requests()))
    assert growing.engine.stats.by_engine()["engine/serving"] == 1.0
    started(growing, 1)
    assert tokens(generate(growing.engine, requests())) == alone
    assert list(tickets_of(growing)) == [0]  # it has no weights yet
    assert growing.logs.events == []
    for each in (growing, whole):
        each.publish(weights, 2)
    (joined,) = growing.logs.of("engine_joined")
    assert (joined["engine"], joined["version"], joined["serving"]) == (1, 2, 2)
    done = generate(growing.engine, requests())
    assert bits(done) == bits(generate(whole.engine, requests()))
    assert tokens(done) == alone
    told = tickets_of(growing)
    assert told == tickets_of(whole)
    assert min(told.values()) > 0.0


@pytest.mark.slow
def test_a_process_whose_place_is_gone_leaves_and_comes_back_at_a_publish(shared: Any) -> None:
    shrinking, whole = shared(2, {1: dies_in("turn", 1)}), shared(2)
    weights = [(n, t + 0.01) for n, t in new_weights(whole)]
    for each in (shrinking, whole):
        each.publish(weights, 1)
    expected = generate(whole.engine, requests())
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
    for each in (shrinking, whole):
        each.publish(weights, 2)
    assert [event["engine"] for event in shrinking.logs.of("engine_joined")] == [1]
    assert bits(generate(shrinking.engine, requests())) == bits(generate(whole.engine, requests()))


def test_samples_wait_for_a_place_only_where_nobody_else_could_write_them(shared: Any) -> None:
    """Before, they waited cluster.start_seconds for the lost machine while others served."""
    two, one = (shared(size, {0: dies_in("turn", 1)}) for size in (2, 1))
    for lossy in (two, one):
        lossy.site.patience.clear()
        assert len(generate(lossy.engine, requests())) == 35
    assert two.site.patience == [(0, 0.0)]
    assert one.site.patience == [(0, one.site.recipe.cluster.start_seconds)]


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
        growing.engine.rest()
    assert tokens(generate(growing.engine, requests())) == tokens(
        done := generate(expected.engine, requests())
    )
    assert {version for c in done for version, _ in c.versions} == {3}
    (left,), (joined,) = growing.logs.of("engine_left"), growing.logs.of("engine_joined")
    assert (left["engine"], left["returns"], joined["engine"]) == (0, False, 1)
    assert (joined["version"], joined["serving"]) == (3, 1)
    assert growing.site.policy.rests == 1  # when the one that joined had its weights
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


def test_several_vllm_engines_run_and_one_whose_process_dies_is_replaced_alone(
    make_recipe: Any, models: Any, tmp_path: Path
) -> None:
    """Each worker has two vLLM processes of its own; those of worker 1 die at a first request."""

    def recipe(behaviour: str) -> Any:
        vllm = {"python": fake_vllm(tmp_path, behaviour), "engines": 2}
        rollout = {"type": "vllm", "vllm": vllm}
        cluster = {"type": "ray", "rollout": {"workers": 2}}
        return make_recipe("rl", model={"dtype": "float32"}, rollout=rollout, cluster=cluster)

    well, dying = recipe("well"), recipe("dies_at_work")
    lossy = Shared(well, models(0), tmp_path, 2, {}, first={1: dying}, exact=False)
    try:
        lossy.publish(new_meta_weights(models(0)), 3)
        assert len(lossy.engine.logprobs([requests()[0].token_ids], 1.0)) == 1
        done = generate(lossy.engine, requests())
        drawn = [(c.ticket, c.sample) for c in done]
        assert drawn == [(ticket, sample) for ticket in range(7) for sample in range(5)]
        assert all(c.versions == ((3, len(c.token_ids)),) for c in done)
        (lost,) = lossy.logs.of("engine_lost")
        assert re.search(r"vLLM engine [01] died \(exit code 1\)", lost["message"])
        told = lossy.engine.stats.by_engine()
        assert (told["engine/0/losses"], told["engine/1/losses"]) == (0.0, 1.0)
        inside = [told[f"engine/0.{number}/response_tokens"] for number in range(2)]
        assert min(inside) > 0.0
        assert sum(inside) == told["engine/0/response_tokens"]
        assert 0.0 < told["engine/0.0/busy_time_fraction"] <= 1.0
    finally:
        lossy.engine.close()
        for workers in lossy.workers:
            workers._worker._engine.close()


def new_meta_weights(path: str) -> list[tuple[str, torch.Tensor]]:
    return list(load_file(Path(path) / "model.safetensors").items())


def test_an_error_that_would_recur_is_no_loss(shared: Any) -> None:
    engine = shared(1).engine
    engine.submit(requests(max_new_tokens=4000)[0])
    with pytest.raises(Exception, match="places, the cache has"):
        engine.completed()


def test_each_process_tells_what_it_did_since_the_last_report(shared: Any) -> None:
    engine = shared(2).engine
    done = generate(engine, requests())
    first, second = engine.stats.by_engine(), engine.stats.by_engine()
    for number in range(2):
        own = sum(len(c.token_ids) for c in done if c.ticket % 2 == number)
        assert first[f"engine/{number}/response_tokens"] == own
        assert second[f"engine/{number}/response_tokens"] == 0.0
    assert engine.stats.response_tokens == sum(len(c.token_ids) for c in done)
    most = max(first[f"engine/{number}/decode_seconds"] for number in range(2))
    assert engine.stats.decode_seconds == pytest.approx(most)


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


def names(done: list[Completion], left: list[Request]) -> list[tuple[int, int]]:
    return sorted(
        [
            *((c.ticket, c.sample) for c in done),
            *((r.ticket, s) for r in left for s in r.sample_ids),
        ]
    )


EVERY = [(ticket, sample) for ticket in range(7) for sample in range(5)]


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
    lossy.site.policy = Untouched()
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
    lossy.site.policy = Untouched()
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
