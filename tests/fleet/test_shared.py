"""An engine of several processes, without Ray: what is sampled where, and what a loss changes."""

import re
from collections.abc import Callable, Iterator
from concurrent.futures import wait
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from helpers.fake_ranks import SendingRanks
from helpers.fake_vllm import fake_vllm
from helpers.fake_workers import Dies
from helpers.shared_engines import (
    Shared,
    bits,
    dies_in,
    new_weights,
    requests,
    tokens,
)
from postgrad.core.errors import RunError
from postgrad.fleet.remote import RankedWeights
from postgrad.fleet.shared import SharedEngine
from postgrad.rollout.engine import Completion, Request, WeightHandover, generate


@pytest.fixture(scope="session")
def sampled_turns() -> list[Any]:
    """The bits of second turns in two processes that live: at most one list of them."""
    return []


@pytest.fixture(scope="session")
def lockstep() -> list[Any]:
    """The bits of `in_lockstep` in two processes that live: at most one list of them."""
    return []


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


def in_lockstep(engine: SharedEngine) -> list[Completion]:
    """Three turns of each sample: nothing is asked before all have ended the turn before."""
    asked = [replace(r, may_go_on=True) for r in requests(4, 2, max_new_tokens=8)]
    by_sample = {(r.ticket, sample): r for r in asked for sample in r.sample_ids}
    done: list[Completion] = []
    for turn in range(3):
        ended = generate(engine, asked)
        done += ended
        for c in ended:
            before = by_sample[c.ticket, c.sample]
            by_sample[c.ticket, c.sample] = replace(
                before, sample_ids=(c.sample,), turn=turn + 1,
                token_ids=np.concatenate([before.token_ids, c.token_ids]),
            )  # fmt: skip
        asked = list(by_sample.values())
    return done


@pytest.mark.parametrize("turn", range(5))
def test_what_a_dead_process_kept_between_turns_is_made_again_to_the_same_bits(
    shared: Any, turn: int, lockstep: list[Any]
) -> None:
    if not lockstep:
        intact = shared(2)
        lockstep.append(bits(in_lockstep(intact.engine)))
        intact.engine.sleep()  # turns that follow stand behind nothing
        assert bits(in_lockstep(intact.engine)) == lockstep[0]
    lossy = shared(2, {1: dies_in("turn", turn)})
    assert bits(in_lockstep(lossy.engine)) == lockstep[0]
    assert len(lossy.logs.of("engine_joined")) == 1


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


def test_other_weights_than_those_of_the_others_are_never_taken_in(shared: Any) -> None:
    lossy = shared(2, {0: dies_in("turn", 1)}, most=1)
    weights = [(n, t + 0.01) for n, t in new_weights(lossy)]
    lossy.publish(weights, 4)
    lossy.engine.logprobs([request.token_ids for request in requests()], 1.0)
    lossy.launcher.policy.weights = [(n, t + 0.05) for n, t in weights]
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
    intact = shared(2)

    def broken() -> Iterator[tuple[str, torch.Tensor]]:
        yield new_weights(intact)[0]
        raise RunError("the ranks are gone")

    broken_off = RankedWeights(SendingRanks(broken()), "policy")
    with pytest.raises(RunError, match="the ranks are gone"):
        intact.engine.load_weights(WeightHandover(broken_off), 1)
    with pytest.raises(RunError, match="a publish to the rollout engine broke off"):
        intact.engine.logprobs([requests()[0].token_ids], 1.0)


def interrupted(lossy: Any) -> None:
    """Requests are under way, of which some have been answered."""
    for request in requests():
        lossy.engine.submit(request)
    assert lossy.engine.completed()


def published_again(lossy: Any, weights: list[tuple[str, torch.Tensor]]) -> list[Any]:
    """What a paused engine samples once the restarted ranks have published."""
    lossy.engine.resume(None)
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
    lossy.launcher.policy.updates = 5  # it has learned
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
        statistics = lossy.engine.stats.by_engine()
        assert (statistics["engine/0/losses"], statistics["engine/1/losses"]) == (0.0, 1.0)
        inside = [statistics[f"engine/0.{number}/response_tokens"] for number in range(2)]
        assert min(inside) > 0.0
        assert sum(inside) == statistics["engine/0/response_tokens"]
        assert 0.0 < statistics["engine/0.0/busy_time_fraction"] <= 1.0
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
        expected_tokens = sum(len(c.token_ids) for c in done if c.ticket % 2 == number)
        assert first[f"engine/{number}/response_tokens"] == expected_tokens
        assert second[f"engine/{number}/response_tokens"] == 0.0
    assert engine.stats.response_tokens == sum(len(c.token_ids) for c in done)
    most = max(first[f"engine/{number}/decode_seconds"] for number in range(2))
    assert engine.stats.decode_seconds == pytest.approx(most)
