"""Environments beside the engine: how long they take does not change what is decoded together."""

import itertools
import random
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.lives import Dealt
from helpers.rollouts import Chosen, Numbers, Ticking, Words
from postgrad.core.process import done
from postgrad.core.records import EpisodeFailure, Prompt, ScoredGroup
from postgrad.rollout.engine import Completion, Request
from postgrad.rollout.environment import (
    Environments,
    Observation,
    OpenSample,
    SamplingSpec,
    Step,
)
from postgrad.rollout.local.engine import LocalEngine
from postgrad.rollout.sampling import GroupSampler, OpenGroup, sample_groups
from postgrad.rollout.settings import SamplingSettings

SAMPLING = SamplingSettings(max_new_tokens=40)


class Replies:
    """An environment of `turns` replies, each of which `begin` gives as a future."""

    turn_tokens: Sequence[int] = ()
    begins = False

    def __init__(
        self,
        begin: Callable[[Completion, Observation], Future[Observation]],
        turns: int = 3,
        concurrent: int = 16,
        deterministic: bool = True,
    ) -> None:
        self.begin, self.turns = begin, turns
        self.concurrent, self.deterministic = concurrent, deterministic

    def reset(self, prompt: Prompt, sample: int) -> "Replies":
        return self

    def step(self, response: Completion) -> Step:
        last = response.turn + 1 == self.turns
        reply_ids = np.array([5 + response.turn], np.int32)
        reply = Observation(reply_ids, last, reward=1.0, counts={"turns": 1.0})
        return Step(self.begin(response, reply), lambda ended: ended)

    def close(self) -> None:
        """Keeps nothing of an episode."""


def at_once(response: Completion, reply: Observation) -> Future[Observation]:
    return done(reply)


class Late:
    """Gives replies from threads, each after a time drawn by `order`."""

    def __init__(self, order: random.Random, most: float = 0.002) -> None:
        self._order, self._most = order, most
        self._threads = ThreadPoolExecutor(16)

    def __call__(self, response: Completion, reply: Observation) -> Future[Observation]:
        return self._threads.submit(self._give, reply, self._order.random() * self._most)

    @staticmethod
    def _give(reply: Observation, seconds: float) -> Observation:
        time.sleep(seconds)
        return reply


class Traced(Ticking):
    """Notes at which step each turn came."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.came: list[tuple[int, int, tuple[int, ...], int]] = []

    def submit(self, request: Request) -> None:
        self.came.append((self.steps, request.ticket, request.sample_ids, request.turn))
        super().submit(request)


def length_of(seed: int) -> Callable[[int, int, int], int]:
    return lambda ticket, sample, turn: (
        1 + random.Random(f"{seed} {ticket} {sample} {turn}").randrange(12)
    )


def sampled(engine: Any, environment: Any, tickets: int = 4, samples: int = 4) -> list[Any]:
    prompts = [Numbers(100).draw(ticket, 0) for ticket in range(tickets)]
    spec = SamplingSpec(samples, SAMPLING, 0, Environments({None: environment}))
    return sample_groups(engine, Chosen(lambda t, s: 1.0), prompts, spec, Words())


def shown(groups: Sequence[Any]) -> list[Any]:
    return [
        [
            (r.token_ids.tolist(), r.logprobs.tolist(), r.versions, dict(r.counts))
            for r in group.rollouts
        ]
        for group in groups
    ]


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 999), concurrent=st.sampled_from([0, 1, 3, 16]), parts=st.integers(1, 3))
def test_turns_enter_the_engine_at_the_same_steps_however_long_replies_take(
    seed, concurrent, parts
):
    traces: list[Any] = []
    for late in (None, 1, 2):
        begin = at_once if late is None else Late(random.Random(f"{seed} {late}"))
        members = [Traced(length_of(seed)) for _ in range(parts)]
        engine = members[0] if parts == 1 else Dealt(members, random.Random(f"{seed} {late}"))
        groups = sampled(engine, Replies(begin, concurrent=concurrent), tickets=5)
        traces.append((shown(groups), [member.came for member in members]))
    assert traces[0] == traces[1] == traces[2]


def test_all_samples_that_wait_are_replied_to_at_the_same_time():
    everybody = threading.Barrier(16)
    threads = ThreadPoolExecutor(16)

    def together(response: Completion, reply: Observation) -> Future[Observation]:
        def give() -> Observation:
            if response.turn == 0:
                everybody.wait(30.0)  # opens when 16 calls are inside
            return reply

        return threads.submit(give)

    groups = sampled(Ticking(length_of(1)), Replies(together, turns=2))
    assert not everybody.broken
    assert all(rollout.counts["turns"] == 2.0 for group in groups for rollout in group.rollouts)


@pytest.mark.parametrize("deterministic", [True, False])
def test_the_engine_decodes_others_while_a_reply_is_awaited(deterministic):
    waiting: list[tuple[Future[Observation], Observation]] = []

    def after_another(response: Completion, reply: Observation) -> Future[Observation]:
        if response.sample == 0 and response.turn == 0:
            waiting.append((Future(), reply))
            return waiting[0][0]
        if response.sample == 1 and waiting and not waiting[0][0].done():
            waiting[0][0].set_result(waiting[0][1])  # not before the other one's turn has ended
        return done(reply)

    engine = Traced(lambda ticket, sample, turn: 2 if sample == 0 else 9)
    environment = Replies(after_another, turns=2, concurrent=1, deterministic=deterministic)
    (group,) = sampled(engine, environment, tickets=1, samples=2)
    assert [len(rollout.turns) for rollout in group.rollouts] == [3, 3]
    assert (9, 0, (0,), 1) in engine.came  # the other turn was nine tokens long


def test_at_most_as_many_samples_as_are_allowed_wait_beside_a_decoding_engine():
    open_now, most = 0, 0

    class Counting(Ticking):
        def completed(self, awaited=None):
            nonlocal most
            most = max(most, open_now)
            return super().completed(awaited)

    def counted(response: Completion, reply: Observation) -> Future[Observation]:
        nonlocal open_now
        if response.turn:
            return done(reply)
        with lock:
            open_now += 1
        return threads.submit(leave, reply)

    def leave(reply: Observation) -> Observation:
        nonlocal open_now
        time.sleep(0.001)
        with lock:
            open_now -= 1
        return reply

    threads, lock = ThreadPoolExecutor(1), threading.Lock()
    sampled(Counting(lambda ticket, sample, turn: 1 + sample), Replies(counted, concurrent=2))
    assert 1 <= most <= 2


def test_where_nothing_is_exact_a_turn_enters_as_soon_as_its_reply_is_there():
    slow: Future[Observation] = Future()

    def begin(response: Completion, reply: Observation) -> Future[Observation]:
        if response.sample == 0 and response.turn == 0:
            slow.reply = reply  # type: ignore[attr-defined]
            return slow
        if response.sample == 1 and response.turn == 1:
            slow.set_result(slow.reply)  # type: ignore[attr-defined]
        return done(reply)

    engine = Traced(lambda ticket, sample, turn: 3)
    (group,) = sampled(engine, Replies(begin, 2, 16, False), tickets=1, samples=2)
    assert [turn for _, _, samples, turn in engine.came if samples == (0,)] == [1]
    assert engine.came[1:] == [(3, 0, (1,), 1), (6, 0, (0,), 1)]
    assert [len(rollout.turns) for rollout in group.rollouts] == [3, 3]


def test_a_failure_ends_its_sample_and_is_in_its_record():
    broken = EpisodeFailure("wall_clock", "no reply")

    def begin(response: Completion, reply: Observation) -> Future[Observation]:
        if response.sample == 1 and response.turn == 1:
            return done(Observation(reply.token_ids, done=True, failure=broken))
        return done(reply)

    (group,) = sampled(Ticking(length_of(3)), Replies(begin), tickets=1, samples=2)
    assert [rollout.failure for rollout in group.rollouts] == [None, broken]
    assert [len(rollout.turns) for rollout in group.rollouts] == [5, 3]


def test_a_turn_before_a_reply_without_tokens_keeps_its_reward():
    def silent(response: Completion, reply: Observation) -> Future[Observation]:
        return done(Observation(reply.token_ids[:0], reply.done, reward=1.0 + response.turn))

    (group,) = sampled(Ticking(lambda *_: 2), Replies(silent), tickets=1, samples=1)
    assert group.rollouts[0].columns["turn_rewards"].tolist() == [0, 1, 0, 2, 0, 3]


@pytest.mark.parametrize("lengths", [(0, 2, 1), (0, 0, 0)])
def test_the_reward_of_an_empty_turn_before_any_token_is_at_the_first(lengths: tuple[int, ...]):
    """A server may answer nothing. It was at the episode's last token; with none, an error."""

    def silent(response: Completion, reply: Observation) -> Future[Observation]:
        return done(Observation(reply.token_ids[:0], reply.done, reward=1.0 + response.turn))

    spec = SamplingSpec(1, SAMPLING, 0, Environments({None: Replies(silent)}))
    sample = OpenSample(Numbers(100).draw(0, 0), 0, spec)
    for turn, length in enumerate(lengths):
        ids, logprobs = np.full(length, 65, np.int32), np.zeros(length, np.float32)
        written = Completion(0, 0, turn, ids, logprobs, "stop", ((0, length),), "")
        sample.observe(sample.take(written).result())
    expected = [1.0, 2.0, 3.0] if any(lengths) else [6.0]
    assert sample.rollout(Words()).columns["turn_rewards"].tolist() == expected


def test_waiting_for_many_prompts_looks_at_each_of_them_a_few_times(monkeypatch):
    """Looked at whenever a turn ended, 8192 prompts took a minute of a step."""
    looks, ended = [0], OpenGroup.ended.fget

    def counted(group: OpenGroup) -> bool:
        looks[0] += 1
        return ended(group)

    monkeypatch.setattr(OpenGroup, "ended", property(counted))
    sampled(Ticking(lambda ticket, *_: 1 + ticket % 3, slots=2), Replies(at_once), 60, 1)
    assert looks[0] < 20 * 60


class Refusing(Chosen):
    """Gives a group at a time, to whoever waits. A sample without a score refuses a step."""

    def completed(self, wait: bool) -> list[ScoredGroup]:
        ended = self._done[:1] if wait else []
        self._done = self._done[len(ended) :]
        return ended

    def too_many_failed(self, groups: Iterable[ScoredGroup], samples: int) -> bool:
        return any(np.isnan(group.total).any() for group in groups)


def test_an_evaluation_takes_no_group_of_a_refused_step_for_its_own():
    """Groups 1 and 2 of the step are scored only when the evaluation waits for those tickets."""
    scorer, spec = Refusing(lambda ticket, sample: ticket or None), SamplingSpec(2, SAMPLING, 0)
    ahead = GroupSampler(Ticking(length_of(1)), scorer, spec, Words())
    ahead.start([Numbers(3).draw(ticket, 0) for ticket in range(3)])
    assert [group.prompt.ticket for group in ahead.fill(range(3))] == [0]
    held_out = [replace(Numbers(9).draw(ticket, 0), question="held out") for ticket in (1, 2)]
    groups = sample_groups(Ticking(length_of(2)), scorer, held_out, spec, Words())
    assert [group.prompt.question for group in groups] == ["held out"] * 2


def test_a_cut_waits_for_replies_and_goes_on_behind_them():
    late = Late(random.Random(0), most=0.02)
    engine = Traced(lambda ticket, sample, turn: 2 + 4 * sample)
    spec = SamplingSpec(3, SAMPLING, 0, Environments({None: Replies(late)}))
    sampler = GroupSampler(engine, Chosen(lambda t, s: 1.0), spec, Words())
    sampler.start([Numbers(100).draw(0, 0), Numbers(100).draw(1, 0)])
    sampler._take(engine.completed())
    sampler.cut()
    asked = [sample.request for group in sampler.groups.values() for sample in group.samples]
    assert [request.turn for request in asked] == [1, 0, 0, 1, 0, 0]
    sampler.start_groups(list(sampler.groups.values()))
    cut = sampler.finish([0, 1])
    assert shown(cut) == shown(sampled(Ticking(engine._length), Replies(at_once), 2, 3))


def test_turns_have_the_environments_limits_of_tokens():
    class Short(Replies):
        turn_tokens = (7, 3)

    limits: list[int] = []

    class Limits(Ticking):
        def submit(self, request: Request) -> None:
            limits.append(request.sampling.max_new_tokens)
            super().submit(request)

    sampled(Limits(lambda ticket, sample, turn: 2), Short(at_once, turns=3), 1, 1)
    assert limits == [7, 3, 3]


@pytest.mark.slow
def test_the_built_in_engine_gives_the_same_bits_however_long_replies_take(
    model, tokenizer, prompt
):
    lm = model("qwen3")
    results = []
    for late in (1, 2, 3):
        engine = LocalEngine(lm, tokenizer, slots=6, cache_tokens=6 * 96)
        environment = Replies(Late(random.Random(late), most=0.01), turns=2, concurrent=3)
        prompts = [Prompt(t, prompt(t, 5), "?", None, "rows", t) for t in range(3)]
        played = Environments({None: environment})
        spec = SamplingSpec(4, SamplingSettings(max_new_tokens=12), 3, played)
        groups = sample_groups(engine, Chosen(lambda t, s: 1.0), prompts, spec, tokenizer)
        results.append(
            [(r.token_ids.tobytes(), r.logprobs.tobytes()) for g in groups for r in g.rollouts]
        )
    assert results[0] == results[1] == results[2]


def test_a_queue_far_longer_than_the_engine_has_rows_ends_in_order_with_the_same_tokens(
    model, tokenizer, prompt
):
    """verl#7990: 32 samples of two turns in two rows, also where new weights come in the middle."""
    other = list(model("qwen3", seed=1).named_parameters())
    prompts = [Prompt(t, prompt(t, 5), "?", None, "rows", t) for t in range(8)]

    def played(slots: int, publish: int | None = None) -> list[Any]:
        """publish: after so many turns."""
        engine = LocalEngine(model("qwen3"), tokenizer, slots=slots, cache_tokens=slots * 64)
        late, turns = Late(random.Random(slots)), itertools.count(1)

        def begin(response: Completion, reply: Observation) -> Future[Observation]:
            if next(turns) == publish:
                engine.load_weights(other, 1)
            return late(response, reply)

        environments = Environments({None: Replies(begin, turns=2, concurrent=3)})
        spec = SamplingSpec(4, SamplingSettings(max_new_tokens=8), 3, environments)
        groups = sample_groups(engine, Chosen(lambda t, s: 1.0), prompts, spec, tokenizer)
        rollouts = [rollout for group in groups for rollout in group.rollouts]
        assert [(r.ticket, r.sample) for r in rollouts] == [divmod(n, 4) for n in range(32)]
        return rollouts

    narrow, wide = played(2), played(32)
    assert [r.token_ids.tolist() for r in narrow] == [r.token_ids.tolist() for r in wide]
    assert len({r.token_ids.tobytes() for r in narrow}) > 16
    renewed = played(2, publish=20)
    assert {v for r in renewed for v, _ in r.versions} == {0, 1}
    for before, after in zip(narrow, renewed, strict=True):
        assert [turn.author for turn in after.turns] == ["policy", "environment", "policy"]
        if all(version == 0 for version, _ in after.versions):
            assert after.token_ids.tolist() == before.token_ids.tolist()


def test_what_a_step_waits_for_is_told_by_ticket() -> None:
    """Five groups of two samples, of 1 and 3 tokens; with four rows two groups are decoded."""
    reports: list[str] = []
    engine = Ticking(
        lambda ticket, sample, turn: 1 + 2 * sample, rest=lambda: reports.append(sampler.awaited())
    )
    spec = SamplingSpec(2, SAMPLING, 0)
    sampler = GroupSampler(engine, Chosen(lambda t, s: 1.0), spec, Words())
    assert sampler.awaited() == ""
    sampler.start([Numbers(5).draw(ticket, 0) for ticket in range(5)])
    sampler.finish(range(5))
    first = [f"ticket {ticket} (samples 2 being written)" for ticket in range(3)]
    assert reports[0] == f"{', '.join(first)} and 2 more"
    assert reports[1].startswith("ticket 0 (samples 1 being written), ticket 1 (samples 1 being")
    assert sampler.awaited() == ""
