"""The controller's side of vLLM: requests, weights, scores, and processes that go wrong."""

import json
import os
import signal
from pathlib import Path

import numpy as np
import pytest
import torch

from contracts.conftest import small_model
from postgrad.core.errors import RunError, UsageError
from postgrad.models.linear import SHAPES_KEPT
from postgrad.rollout.engine import Request, generate
from postgrad.rollout.settings import SamplingSettings
from postgrad.rollout.vllm import engine as engine_module
from postgrad.rollout.vllm import process as process_module


def request(ticket=0, samples=2, turn=0, seed=0, length=3, **sampling):
    settings = SamplingSettings(**({"max_new_tokens": 8} | sampling))
    ids = np.arange(2, 2 + length, dtype=np.int32)
    return Request(ticket, tuple(range(samples)), ids, settings, turn, seed)


def said(folder, number=0):
    """The messages that a process has heard, by its log."""
    text = (folder / f"vllm-{number}.log").read_text("utf-8")
    return [json.loads(line) for line in text.splitlines() if line.startswith("{")]


def weights(seed=0):
    return list(small_model(seed).named_parameters())


def test_every_sample_comes_back_as_it_was_asked_for(make_engine):
    engine = make_engine()
    done = generate(engine, [request(1), request(0, samples=1, turn=2)])
    assert [(c.ticket, c.sample, c.turn) for c in done] == [(0, 0, 2), (1, 0, 0), (1, 1, 0)]
    one = done[1]
    assert one.token_ids.tolist()[:3] == [2, 3, 4]
    assert one.logprobs.tolist() == [-0.5] * 4
    assert one.finish_reason == "stop"
    assert one.versions == ((0, 4),)
    assert one.text.startswith("abc")
    assert engine.stats.prompt_tokens == 6
    assert engine.stats.response_tokens == 12
    assert engine.completed() == []


def test_a_samples_seed_depends_on_what_names_it_and_nothing_else(make_engine, tmp_path):
    engine = make_engine()
    asked = [request(), request(1), request(turn=1), request(seed=1), request()]
    for one in asked:
        generate(engine, [one])
    seeds = [tuple(one["seeds"]) for one in said(tmp_path)]
    assert seeds[0] == seeds[-1]
    assert len({seed for few in seeds for seed in few}) == 8


def test_prompts_go_to_engines_by_their_ticket(make_engine, tmp_path):
    engine = make_engine("well", "well")
    generate(engine, [request(ticket) for ticket in (0, 1, 2, 4)])
    assert [len(said(tmp_path, number)) for number in (0, 1)] == [3, 1]


def test_sampling_is_said_in_vllms_words(make_engine, tmp_path):
    generate(make_engine(), [request(temperature=0.5, top_k=3, stop=("a", "b"))])
    assert said(tmp_path)[0]["sampling"] == {
        "temperature": 0.5,
        "top_p": 1.0,
        "top_k": 3,
        "min_p": 0.0,
        "stop": ["a", "b"],
        "max_tokens": 8,
        "stop_token_ids": [1],
    }


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
    (one,) = generate(engine, [request(samples=1)])
    assert one.versions == ((7, 4),)
    calls = [one["do"] for one in said(tmp_path) if "call" in one]
    assert calls == ["score", "start_weights", "load_weights", "finish_weights", "score"]


def test_half_of_the_weights_are_refused(make_engine):
    with pytest.raises(RunError, match="1 are missing"):
        make_engine().load_weights(weights()[1:], 1)


def test_an_engine_with_other_weights_than_the_first_is_found(make_engine):
    engine = make_engine("well", "stale")
    engine.load_weights(weights(), 1)
    with pytest.raises(RunError, match=r"vLLM engine 1 does not have the weights of vLLM engine 0"):
        engine.logprobs([np.arange(5)], 1.0)


def test_diverged_weights_are_an_error_and_no_sample(make_engine):
    with pytest.raises(RunError, match=r"not finite \(version 0, ticket 0, sample 0\)"):
        generate(make_engine("diverged"), [request()])


def test_it_sleeps_when_nothing_is_asked_and_wakes_for_whatever_is(make_engine, tmp_path):
    engine = make_engine(sleeps=True)
    engine.rest()
    engine.rest()
    engine.load_weights(weights(), 1)
    engine.rest()
    generate(engine, [request()])
    what = [one["do"] for one in said(tmp_path)]
    assert [one for one in what if one in ("sleep", "wake")] == ["sleep", "wake"] * 2
    assert what.index("wake") < what.index("start_weights")


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


def test_a_process_that_hangs_at_its_start_is_not_waited_for(start_engine, monkeypatch):
    monkeypatch.setattr(engine_module, "STILL_SECONDS", 0.2)
    monkeypatch.setattr(process_module, "LOOK_SECONDS", 0.0)
    with pytest.raises(RunError, match=r"hangs at its start: .* has used a processor"):
        start_engine("never_ready")


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
    told = Path(f"/proc/{engine._processes[0]._process.pid}/environ").read_text("utf-8")
    for variable in SHAPES_KEPT:
        assert os.environ[variable]
        assert variable not in told


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
    assert said(tmp_path)[0]["sampling"]["stop_token_ids"] == [1]
    assert (tmp_path / "vllm-1.log").exists()


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
    engine._names = {id(one): name for name, one in lm.named_parameters()}
    both = dict(lm.named_parameters(remove_duplicate=False))
    del both["model.embed_tokens.weight"]
    engine.load_weights(both.items(), 1)
    assert engine.logprobs([np.arange(3)], 1.0)[0].tolist() == [0, -2, -2]
