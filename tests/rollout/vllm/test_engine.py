"""The controller's side of vLLM: requests, weights, scores, and processes that go wrong."""

import hashlib
import json
import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from contracts.conftest import small_model
from postgrad.core.errors import RunError, UsageError
from postgrad.models.linear import SHAPES_KEPT
from postgrad.models.settings import LoraSettings
from postgrad.parallel.device import ALLOCATOR
from postgrad.rollout.engine import Request, Written, generate
from postgrad.rollout.grammar import lark_of
from postgrad.rollout.settings import SamplingSettings
from postgrad.rollout.vllm import engine as engine_module
from postgrad.rollout.vllm import process as process_module
from postgrad.rollout.vllm.model import seed_of
from postgrad.rollout.vllm.weights import WeightNames


def request(ticket=0, samples=2, turn=0, seed=0, length=3, **sampling):
    settings = SamplingSettings(**({"max_new_tokens": 8} | sampling))
    ids = np.arange(2, 2 + length, dtype=np.int32)
    return Request(ticket, tuple(range(samples)), ids, settings, turn, seed)


def received(folder, number=0):
    """The messages that a process has heard, by its log."""
    text = (folder / f"vllm-{number}.log").read_text("utf-8")
    return [json.loads(line) for line in text.splitlines() if line.startswith("{")]


def weights(seed=0):
    return list(small_model(seed).named_parameters())


def test_every_sample_comes_back_as_it_was_asked_for(make_engine):
    engine = make_engine()
    done = generate(engine, [request(1), request(0, samples=1, turn=2)])
    assert [(c.ticket, c.sample, c.turn) for c in done] == [(0, 0, 2), (1, 0, 0), (1, 1, 0)]
    completion = done[1]
    assert completion.token_ids.tolist()[:3] == [2, 3, 4]
    assert completion.logprobs.tolist() == [-0.5] * 4
    assert completion.finish_reason == "stop"
    assert completion.versions == ((0, 4),)
    assert completion.text.startswith("abc")
    assert engine.stats.prompt_tokens == 6
    assert engine.stats.response_tokens == 12
    assert engine.completed() == []


def test_experts_of_a_sample_are_those_of_the_layers_with_routers(make_engine):
    (done,) = generate(make_engine("routes", routed=(1,)), [request(samples=1)])
    every = np.arange(6 * 4).reshape(6, 2, 2)  # 3 tokens of the prompt, and 4 of which 3 went on
    assert done.experts[:-1].tolist() == every[:, 1:].tolist()
    assert done.experts[-1].tolist() == [[-1, -1]]


def test_a_sample_that_goes_on_keeps_the_experts_of_its_first_time(make_engine):
    first = np.full((5, 1, 2), 7, np.int16)  # of 3 tokens of the prompt and of 2 written ones
    first[-1] = -1
    written = Written(np.array([5, 6], np.int32), np.zeros(2, np.float32), ((0, 2),), first)
    engine = make_engine("routes", routed=(1,))
    (done,) = generate(engine, [replace(request(samples=1), written=written)])
    again = np.arange(10 * 4).reshape(10, 2, 2)[:, 1:]
    assert done.experts[:4].tolist() == first[:4].tolist()
    assert done.experts[4:10].tolist() == again[4:].tolist()


def test_experts_that_are_not_those_of_the_tokens_are_an_error(make_engine):
    engine = make_engine("routes_less", routed=(1,))
    with pytest.raises(RunError, match="20 numbers of experts for 6 tokens in 2 layers"):
        generate(engine, [request(samples=1)])


def test_experts_are_recorded_on_gpus_alone(start_engine):
    with pytest.raises(UsageError, match='"sampled": vLLM records the experts of samples on GPUs'):
        start_engine(rollout={"router_replay": "sampled"})


def test_a_samples_seed_depends_on_what_names_it_and_nothing_else(make_engine, tmp_path):
    engine = make_engine()
    asked = [request(), request(1), request(turn=1), request(seed=1), request()]
    for asked_request in asked:
        generate(engine, [asked_request])
    seeds = [tuple(message["seeds"]) for message in received(tmp_path)]
    assert seeds[0] == seeds[-1]
    assert len({seed for few in seeds for seed in few}) == 8


def test_prompts_go_to_engines_by_their_ticket(make_engine, tmp_path):
    engine = make_engine("well", "well")
    generate(engine, [request(ticket) for ticket in (0, 1, 2, 4)])
    assert [len(received(tmp_path, number)) for number in (0, 1)] == [3, 1]


def test_sampling_is_said_in_vllms_words(make_engine, tmp_path):
    generate(make_engine(), [request(temperature=0.5, top_k=3, stop=("a", "b"))])
    assert received(tmp_path)[0]["sampling"] == {
        "temperature": 0.5,
        "top_p": 1.0,
        "top_k": 3,
        "min_p": 0.0,
        "stop": ["a", "b"],
        "max_tokens": 8,
        "stop_token_ids": [1],
    }


def test_a_grammar_is_said_in_vllms_words(make_engine, tmp_path):
    """The fake answers abc, and then the token that is its seed's last digit."""
    engine = make_engine()
    seed = next(n for n in range(99) if seed_of(request(seed=n), 0) % 10 == 5)
    for kind, text in (("regex", "abcd"), ("lark", "start: /abc[a-d]/")):
        (done,) = generate(engine, [request(samples=1, seed=seed, **{kind: text})])
        lark = lark_of((kind, text), ())
        assert received(tmp_path)[-1]["sampling"]["structured_outputs"] == {"grammar": lark}
        assert (done.text, done.finish_reason) == ("abcd", "stop")


def test_what_vllm_writes_behind_a_dead_end_is_taken_away_and_named(make_engine):
    """No token has the q that must follow "ab"; the fake goes on with a c and another."""
    for completion in generate(make_engine(), [request(regex="abq")]):
        assert completion.token_ids.tolist() == [2, 3]
        assert completion.logprobs.tolist() == [-0.5, -0.5]
        assert completion.versions == ((0, 2),)
        assert (completion.finish_reason, completion.text) == ("dead_end", "ab")


def test_a_sample_of_vllms_that_does_not_follow_its_grammar_is_an_error(make_engine):
    message = "token 2 of its turn is 4, which rollout.regex does not allow there"
    with pytest.raises(RunError, match=message):
        generate(make_engine(), [request(regex="abd")])


def test_a_sample_that_goes_on_under_a_grammar_is_refused(make_engine):
    """vLLM would begin the grammar anew behind the tokens that are there."""
    written = Written(np.array([2], np.int32), np.zeros(1, np.float32), ((0, 1),))
    asked = replace(request(samples=1, regex="a+"), written=written)
    with pytest.raises(UsageError, match="vLLM begins a grammar anew where a sample goes on"):
        make_engine().submit(asked)


def test_a_request_that_can_never_fit_is_refused_at_once(make_engine):
    with pytest.raises(UsageError, match=r"ticket 3: a prompt of 33 tokens and 8 new ones"):
        make_engine().submit(request(3, length=33))


def test_weights_arrive_whole_and_are_named(make_engine, tmp_path):
    engine = make_engine()
    before = engine.logprobs([np.arange(5)], 1.0)
    engine.load_weights(weights(), 7)
    after = engine.logprobs([np.arange(5)], 1.0)
    assert before[0].tolist() == [0, -1, -1, -1, -1]
    assert after[0].tolist() == [0, -8, -8, -8, -8]
    (completion,) = generate(engine, [request(samples=1)])
    assert completion.versions == ((7, 4),)
    assert moves(tmp_path) == ["score", "start_weights", "load_weights", "finish_weights", "score"]


def test_half_of_the_weights_are_refused(make_engine):
    with pytest.raises(RunError, match="1 are missing"):
        make_engine().load_weights(weights()[1:], 1)


def test_an_engine_with_other_weights_than_the_first_is_found(make_engine):
    engine = make_engine("well", "stale")
    engine.load_weights(weights(), 1)
    with pytest.raises(RunError, match=r"vLLM engine 1 does not have the weights of vLLM engine 0"):
        engine.logprobs([np.arange(5)], 1.0)


def test_diverged_weights_are_an_error_and_no_sample(make_engine):
    with pytest.raises(RunError, match=r"not finite \(version 0, ticket 0, sample 0, token 0\)"):
        generate(make_engine("diverged"), [request()])


def moves(folder, number=0):
    """The calls of a process, a wake with its part; not the first question where it works."""
    calls = [
        message
        for message in received(folder, number)
        if "call" in message and message["do"] != "places"
    ]
    return [call.get("part", call["do"]) for call in calls]


PUBLISH = ["weights", "start_weights", "load_weights", "finish_weights", "kv_cache"]


def test_beside_a_learner_it_wakes_for_weights_loads_them_and_wakes_for_its_cache(
    make_engine, tmp_path
):
    engine = make_engine("well", "well", level=2)
    for step in (1, 2):
        engine.sleep()
        engine.sleep()
        engine.load_weights(weights(), step)
        assert generate(engine, [request()])[0].versions == ((step, 4),)
    for number in (0, 1):
        assert moves(tmp_path, number) == ["sleep", *PUBLISH] * 2
    assert {message["level"] for message in received(tmp_path) if message["do"] == "sleep"} == {2}


def test_weights_that_were_dropped_are_not_sampled_from(make_engine, tmp_path):
    engine = make_engine(level=2)
    engine.sleep()
    for use in (lambda: engine.submit(request()), lambda: engine.logprobs([np.arange(3)], 1.0)):
        with pytest.raises(RunError, match=r"dropped its weights .* publish weights before"):
            use()
    engine.load_weights(weights(), 1)
    assert engine.logprobs([np.arange(3)], 1.0)[0].tolist() == [0, -2, -2]
    assert moves(tmp_path) == ["sleep", *PUBLISH, "score"]


def test_weights_that_were_kept_wake_for_whatever_is_asked(make_engine, tmp_path):
    engine = make_engine(level=1)
    engine.sleep()
    generate(engine, [request()])
    engine.sleep()
    engine.logprobs([np.arange(3)], 1.0)
    assert moves(tmp_path) == ["sleep", "weights", "kv_cache"] * 2 + ["score"]


def test_on_devices_of_its_own_it_never_sleeps(make_engine, tmp_path):
    engine = make_engine(level=0)
    engine.sleep()
    engine.load_weights(weights(), 1)
    assert moves(tmp_path) == PUBLISH[1:-1]


def test_it_does_not_sleep_while_samples_are_in_flight(make_engine, tmp_path):
    """vLLM would abort them."""
    engine = make_engine(level=2)
    engine.submit(request())
    engine.sleep()
    assert len(engine.completed()) > 0
    assert moves(tmp_path) == []


@pytest.mark.parametrize(
    "point",
    ["sleep", "wake_weights", "start_weights", "load_weights", "finish_weights", "wake_kv_cache"],
)
@pytest.mark.parametrize("level", [1, 2])
def test_a_failure_on_the_way_from_sleep_to_work_leaves_no_engine_half_awake(
    make_engine, point, level
):
    """The second of two engines fails; the first would go on."""
    engine = make_engine("well", f"fails_at_{point}", level=level)

    def step():
        engine.sleep()
        engine.load_weights(weights(), 1)

    with pytest.raises(RunError, match=r"vLLM engine 1 failed: RuntimeError: CUDA error"):
        step()
    assert [process.alive for process in engine._processes] == [False, False]
    for use in (step, lambda: engine.submit(request()), lambda: engine.logprobs([[1, 2]], 1.0)):
        with pytest.raises(RunError, match="vLLM has been ended: see the error before this one"):
            use()


def test_weights_that_break_off_leave_no_engine_half_awake(make_engine):
    """The learner's ranks may be lost while they send."""
    engine = make_engine("well", level=2)
    engine.sleep()

    def broken():
        yield weights()[0]
        raise RunError("rank 1 died")

    with pytest.raises(RunError, match="rank 1 died"):
        engine.load_weights(broken(), 1)
    assert not engine._processes[0].alive


@pytest.mark.parametrize(
    ("behaviour", "message"),
    [("stays_awake", "0 does not sleep when"), ("stays_asleep", "0 still sleeps after it was")],
)
def test_an_engine_that_does_not_do_what_it_is_told_is_found(make_engine, behaviour, message):
    engine = make_engine(behaviour, level=2)

    def step():
        engine.sleep()
        engine.load_weights(weights(), 1)

    with pytest.raises(RunError, match=message):
        step()
    assert not engine._processes[0].alive


@pytest.mark.parametrize(
    ("behaviour", "message"),
    [
        ("dies_at_start", r"(?s)vLLM engine 0 died \(exit code 1\).*no room for weights"),
        ("refuses", r"failed: ValueError: head size 16 is not known"),
        (
            "worker_fails",
            r"failed: Exception: see above; .* of its workers: AssertionError: no such",
        ),
        ("never_ready", r"was not ready after rollout.vllm.start_seconds = 0.2"),
    ],
)
def test_a_process_that_does_not_start_says_why(start_engine, behaviour, message):
    with pytest.raises(RunError, match=message):
        start_engine(behaviour, start_seconds=0.2 if behaviour == "never_ready" else 60.0)


@pytest.mark.slow
def test_a_process_that_hangs_at_its_start_is_not_waited_for(start_engine, monkeypatch):
    monkeypatch.setattr(engine_module, "STILL_SECONDS", 0.2)
    monkeypatch.setattr(process_module, "LOOK_SECONDS", 0.0)
    with pytest.raises(RunError, match=r"hangs at its start: .* has used a processor"):
        start_engine("never_ready")


@pytest.mark.slow
def test_a_process_that_computes_for_long_at_its_start_is_waited_for(start_engine, monkeypatch):
    monkeypatch.setattr(engine_module, "STILL_SECONDS", 0.2)
    monkeypatch.setattr(process_module, "LOOK_SECONDS", 0.0)
    generate(start_engine("computes_long"), [request()])


def test_an_error_of_an_earlier_start_is_not_told_again(start_engine, tmp_path):
    for behaviour in ("worker_fails", "dies_at_start"):
        with pytest.raises(RunError) as raised:
            start_engine(behaviour)
    assert "no room for weights" in str(raised.value)
    assert "no such shape" not in str(raised.value)


def test_a_process_that_dies_at_work_ends_the_run_with_its_log(start_engine):
    engine = start_engine("dies_at_work")
    with pytest.raises(RunError, match=r"(?s)vLLM engine 0 died.*killed by a bad kernel"):
        generate(engine, [request()])


def test_a_process_that_is_killed_is_named(make_engine):
    engine = make_engine()
    engine.ready(60.0)
    os.kill(engine._processes[0]._process.pid, signal.SIGKILL)
    with pytest.raises(RunError, match=r"vLLM engine 0 died \(exit code -9\)"):
        engine.logprobs([np.arange(5)], 1.0)


def test_what_is_set_for_the_controllers_products_does_not_reach_vllm(make_engine):
    engine = make_engine()
    engine.ready(60.0)
    environment = Path(f"/proc/{engine._processes[0]._process.pid}/environ").read_text("utf-8")
    for variable in SHAPES_KEPT:
        assert os.environ[variable]
        assert variable not in environment


@pytest.mark.parametrize(
    ("stated", "kept"),
    [
        ("expandable_segments:True", None),
        ("max_split_size_mb:64,expandable_segments:True", "max_split_size_mb:64"),
        ("garbage_collection_threshold:0.8", "garbage_collection_threshold:0.8"),
    ],
)
@pytest.mark.parametrize("variable", ALLOCATOR)
def test_vllm_sleeps_in_a_pool_and_gets_no_expandable_segments(
    make_engine, monkeypatch, variable, stated, kept
):
    for name in ALLOCATOR:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(variable, stated)
    engine = make_engine()
    engine.ready(60.0)
    environment = Path(f"/proc/{engine._processes[0].pid}/environ").read_text("utf-8").split("\0")
    of_allocator = [line for line in environment if line.startswith(ALLOCATOR)]
    assert of_allocator == ([f"{variable}={kept}"] if kept else [])


@pytest.mark.parametrize(
    ("beside_learner", "visible", "stated", "level"),
    [
        (True, "3", {}, 2),  # one card for both
        (True, "0,1", {}, 0),  # the learner has the first, the engine the last
        (True, "0,1", {"engines": 2}, 2),  # one of the engines has the learner's
        (False, "3", {}, 0),  # a rollout worker with a card of its own
        (True, "3", {"sleep": False}, 0),
        (True, "3", {"sleep": True}, 2),
        (False, "3", {"sleep": True}, 1),
    ],
)
def test_an_engine_sleeps_without_its_weights_on_a_learners_card_alone(
    start_engine, tmp_path, monkeypatch, beside_learner, visible, stated, level
):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    place = {"device": torch.device("cuda"), "beside_learner": beside_learner}
    engine = start_engine(**stated, place=place)
    engine.sleep()
    engine.load_weights(weights(), 1)
    slept = [message["level"] for message in received(tmp_path) if message["do"] == "sleep"]
    assert slept == ([level] if level else [])
    environment = Path(f"/proc/{engine._processes[0].pid}/environ").read_text("utf-8").split("\0")
    assert f"CUDA_VISIBLE_DEVICES={visible.split(',')[-1]}" in environment


def test_an_environment_without_vllm_is_a_wrong_recipe(start_engine):
    with pytest.raises(UsageError, match=r"rollout.vllm.python = .* has no package vllm"):
        start_engine("without_vllm")


def test_sleep_on_a_cpu_is_a_wrong_recipe(start_engine):
    with pytest.raises(UsageError, match=r"rollout.vllm.sleep: vLLM cannot sleep on a CPU"):
        start_engine(sleep=True)


def test_no_environment_at_all_is_told_with_its_variable(start_engine, monkeypatch):
    monkeypatch.delenv("POSTGRAD_VLLM_PYTHON", raising=False)
    with pytest.raises(UsageError, match="POSTGRAD_VLLM_PYTHON"):
        start_engine(python=None)
    with pytest.raises(UsageError, match="cannot be started as Python"):
        start_engine(python="/no/such/python")


def test_a_started_engine_has_the_models_ends_and_sizes(start_engine, tmp_path):
    engine = start_engine(engines=2)
    generate(engine, [request()])
    assert received(tmp_path)[0]["sampling"]["stop_token_ids"] == [1]
    assert (tmp_path / "vllm-1.log").exists()


def test_several_engines_are_reported_one_by_one(make_engine):
    engine = make_engine("well", "well")
    done = generate(engine, [request(ticket=ticket) for ticket in range(3)])
    statistics = engine.stats.by_engine()
    for number in range(2):
        own_completions = [c for c in done if c.ticket % 2 == number]
        assert statistics[f"engine/{number}/requests"] == len(own_completions)
        assert statistics[f"engine/{number}/response_tokens"] == sum(
            len(c.token_ids) for c in own_completions
        )
        assert 0.0 < statistics[f"engine/{number}/busy_seconds"] <= engine.stats.busy_seconds
    assert engine.stats.requests == len(done)


def test_no_process_is_idle_where_only_every_second_ticket_comes(make_engine):
    """As to a rollout worker beside another: the tickets 0, 2, 4 and 6 were all dealt to one."""
    engine = make_engine("well", "well")
    engine.deal_every(2)
    generate(engine, [request(ticket=ticket) for ticket in range(0, 8, 2)])
    statistics = engine.stats.by_engine()
    assert [statistics[f"engine/{number}/requests"] for number in range(2)] == [4, 4]


def test_nothing_is_left_when_it_is_closed(start_engine):
    engine = start_engine()
    process = engine._processes[0]
    engine.close()
    engine.close()
    assert not process.alive


def test_a_tied_weight_goes_by_the_name_that_vllm_reads(make_engine):
    engine = make_engine()
    lm = small_model()
    lm.lm_head.weight = lm.model.embed_tokens.weight
    engine._model = type(engine._model)(lm, None, (1,), torch.float32, 40)
    engine._names = WeightNames(lm)
    both = dict(lm.named_parameters(remove_duplicate=False))
    del both["model.embed_tokens.weight"]
    engine.load_weights(both.items(), 1)
    assert engine.logprobs([np.arange(3)], 1.0)[0].tolist() == [0, -2, -2]


def test_a_publish_tells_its_way_its_bytes_and_its_seconds(make_engine):
    sent = make_engine().load_weights(weights(), 1)
    assert (sent.way, sent.fallback) == ("memory", "")
    assert sent.size >= sum(weight.nbytes for _, weight in weights())
    assert set(sent.metrics) == {"publish/send_seconds", "publish/sent_bytes", "publish/by_memory"}


def test_a_parcel_that_was_lost_on_the_way_ends_the_engine(make_engine):
    engine = make_engine("loses_a_parcel")
    with pytest.raises(RunError, match="0 parcels arrived"):
        engine.load_weights(weights(), 1)
    assert not engine._processes[0].alive


def test_a_tied_weight_has_the_name_that_vllm_reads_in_its_parcel(make_engine):
    lm = small_model(tied=True)
    names = WeightNames(lm)
    shape = list(lm.lm_head.weight.shape)
    parcel = {"number": 0, "tensors": [{"name": "lm_head.weight", "shape": shape}]}
    (renamed,) = names.of(parcel)["tensors"]
    assert renamed["name"] == "model.embed_tokens.weight"
    with pytest.raises(RunError, match="are missing"):
        names.require_all()


def test_an_answer_that_ended_at_a_stop_string_over_one_cut_does_not_go_on_after_the_next(
    make_engine,
):
    engine = make_engine("waits")
    before = Written(np.array([5, 6], np.int32), np.full(2, -0.25, np.float32), ((4, 2),))
    free = request(samples=1)
    stopping = free.sampling.model_copy(update={"stop": ("ea",)})
    engine.submit(replace(free, written=before, sampling=stopping))
    assert engine.cut() == []
    (ended,) = engine.completed()
    assert (ended.text, ended.finish_reason) == ("dea", "stop")
    assert ended.versions == ((4, 2), (0, 1))
    assert engine.completed() == []


def test_samples_that_are_scored_beside_are_cut_and_go_on(make_engine, tmp_path):
    engine = make_engine("waits")
    engine.submit(request(3))
    (row,) = engine.logprobs([np.arange(4)], 0.7)
    assert row.tolist() == [0.0, -1.0, -1.0, -1.0]
    assert [(r.sample_ids, r.position) for r in engine.cut()] == [((0,), 4), ((1,), 4)]
    calls = [message["do"] for message in received(tmp_path)]
    assert calls == ["sample", "cut", "score", "sample", "sample", "cut"]


def test_a_cut_of_diverged_samples_is_an_error_and_leaves_none_in_flight(make_engine):
    engine = make_engine("waits_diverged")
    engine.submit(request(3))
    with pytest.raises(RunError, match=r"not finite \(version 0, ticket 3, sample 0, token 1\)"):
        engine.cut()
    assert not engine.busy


def test_a_cut_leaves_requests_that_go_on_with_seeds_of_their_positions(make_engine, tmp_path):
    engine = make_engine("waits")
    engine.submit(request(3))
    engine.submit(request(1, samples=1, turn=2))
    left = engine.cut()
    assert [(r.ticket, r.sample_ids, r.turn, r.position) for r in left] == [
        (1, (0,), 2, 2), (3, (0,), 0, 2), (3, (1,), 0, 2),
    ]  # fmt: skip
    assert left[0].written.token_ids.tolist() == [2, 3]
    assert left[0].prefix.tolist() == [2, 3, 4, 2, 3]
    assert not engine.busy
    assert engine.cut() == []
    engine.submit(left[0])
    (twice,) = engine.cut()
    first, _, again = [message for message in received(tmp_path) if message["do"] == "sample"]
    assert again["prompt"] == [2, 3, 4, 2, 3]
    assert again["sampling"]["max_tokens"] == 8 - 2
    assert again["seeds"] != first["seeds"][:1]
    assert twice.written.token_ids.tolist() == [2, 3, 2, 3]
    assert twice.written.versions == ((0, 4),)


def test_an_answer_that_goes_on_comes_back_whole_and_ends_at_a_stop_string_over_the_cut(
    make_engine,
):
    engine = make_engine()
    before = Written(np.array([5, 6], np.int32), np.full(2, -0.25, np.float32), ((4, 2),))
    free = replace(request(samples=1), written=before)
    (continued,) = generate(engine, [free])  # the fake answers with its prompt: abc, de, and more
    assert continued.text.startswith("deabcde")
    assert continued.versions == ((4, 2), (0, len(continued.token_ids) - 2))
    assert continued.logprobs[:3].tolist() == [-0.25, -0.25, -0.5]
    stopping = free.sampling.model_copy(update={"stop": ("never", "eab")})
    (ended,) = generate(engine, [replace(free, sampling=stopping)])
    assert (ended.text, ended.finish_reason) == ("deab", "stop")
    assert ended.versions == ((4, 2), (0, 2))
    assert len(ended.logprobs) == 4


def adapter(value=0.5):
    layer = "base_model.model.model.layers.0.self_attn.q_proj.lora_"
    return {f"{layer}A.weight": torch.full((4, 32), value), f"{layer}B.weight": torch.ones(128, 4)}


def test_an_adapter_is_a_file_for_each_process_of_which_the_newest_stays(make_engine, tmp_path):
    lora = LoraSettings(rank=4, alpha=8)
    engine = make_engine("well", "well", level=1, adapter=lora)
    engine.sleep()
    for version in (1, 2):
        sent = engine.load_weights(adapter(float(version)).items(), version)
    assert (sent.way, sent.size) == ("file", 4 * (4 * 32 + 128 * 4))
    assert engine.logprobs([np.arange(3)], 1.0)[0].tolist() == [0, -3, -3]
    for number, process in enumerate(engine._processes):
        (folder,) = process.folder.glob("adapter-*")
        last_load = [
            message for message in received(tmp_path, number) if message["do"] == "load_adapter"
        ][-1]
        file = folder / "adapter_model.safetensors"
        assert (last_load["path"], last_load["version"]) == (str(folder), 2)
        assert last_load["sha256"] == hashlib.sha256(file.read_bytes()).hexdigest()
        assert {n: t.tolist() for n, t in load_file(file).items()} == {
            n: t.tolist() for n, t in adapter(2.0).items()
        }
        config = json.loads((folder / "adapter_config.json").read_text("utf-8"))
        assert (config["r"], config["lora_alpha"], config["target_modules"]) == (4, 8, ["q_proj"])
        folders = process.folder
        process.close()
        assert not folders.exists()


def test_an_adapter_that_vllm_refuses_ends_all_processes(make_engine):
    engine = make_engine("well", "fails_at_load_adapter", adapter=LoraSettings(rank=4, alpha=8))
    with pytest.raises(RunError, match="out of memory"):
        engine.load_weights(adapter().items(), 1)
    assert [process.alive for process in engine._processes] == [False, False]


def test_who_waits_for_samples_that_never_end_is_woken_and_they_can_be_cut(make_engine):
    engine = make_engine("waits")
    engine.submit(request(3))
    halted, asked = threading.Event(), threading.Event()

    def halt() -> bool:
        asked.set()
        return halted.is_set()

    with ThreadPoolExecutor(1) as executor:
        waiting = executor.submit(engine.completed, halt=halt)
        assert asked.wait(60.0)
        halted.set()
        engine.notify()
        assert waiting.result(60.0) == []
    assert [(r.sample_ids, r.position) for r in engine.cut()] == [((0,), 2), ((1,), 2)]
