"""A decode step as a function of buffers, and steps whose tokens are read late."""

from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from postgrad.core.errors import RunError
from postgrad.models.decoder import LayeredDecoder
from postgrad.rollout.engine import Request, generate
from postgrad.rollout.local import engine as engine_module
from postgrad.rollout.local import step as step_module
from postgrad.rollout.local.engine import LocalEngine
from postgrad.rollout.local.rows import Flight
from postgrad.rollout.local.step import Stepper
from postgrad.rollout.settings import SamplingSettings

SETTINGS = {
    "plain": {},
    "heated": {"temperature": 0.7},
    "greedy": {"temperature": 0.0},
    "filtered": {"top_k": 8, "top_p": 0.9, "min_p": 0.02},
    "stop strings": {"stop": ("ab", "e")},
}


def requests(prompt, **sampling):
    return [
        Request(
            ticket,
            tuple(range(1 + ticket % 4)),
            prompt(ticket % 7, 1 + (7 * ticket) % 30),
            SamplingSettings(max_new_tokens=3 + (5 * ticket) % 20, **sampling),
            seed=ticket % 3,
        )
        for ticket in range(16)
    ]


def mixed(prompt):
    """Every kind of sampling in one batch."""
    asked = [requests(prompt, **sampling) for sampling in SETTINGS.values()]
    return [asked[ticket % len(asked)][ticket] for ticket in range(16)]


def sampled(model, tokenizer, asked, kind="qwen3", slots=9, ahead=0):
    engine = LocalEngine(model(kind), tokenizer, slots=slots, cache_tokens=slots * 64)
    engine._ahead = ahead
    return generate(engine, asked), engine.stats


def assert_same_bits(done, others):
    assert len(done) == len(others) > 20
    for completion, other in zip(done, others, strict=True):
        assert completion.token_ids.tobytes() == other.token_ids.tobytes()
        assert completion.logprobs.tobytes() == other.logprobs.tobytes()
        assert completion.finish_reason == other.finish_reason


@pytest.mark.slow
@pytest.mark.parametrize(
    ("backend", "tokens"),
    [("eager", 8), pytest.param("aot_eager", 3, marks=pytest.mark.slow)],
)
def test_a_step_is_traced_in_one_graph_and_gives_the_same_bits(
    backend, tokens, model, prompt, tokenizer, monkeypatch
):
    """Few shapes: each takes about a second to trace."""
    asked = [
        Request(t, (0, 1), prompt(t, 9), SamplingSettings(max_new_tokens=tokens - t % 2))
        for t in range(6)
    ]
    eager, _ = sampled(model, tokenizer, asked, slots=12)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()  # other tests of this process compile too
    traced, calls = torch.compile(step_module.step, backend=backend, fullgraph=True), []

    def compiled(*arguments):
        calls.append(arguments)
        traced(*arguments)

    monkeypatch.setattr(step_module, "step", compiled)
    compiled_samples, stats = sampled(model, tokenizer, asked, slots=12)
    assert len(calls) == stats.decode_steps > 2
    assert torch._dynamo.utils.counters["graph_break"] == {}
    assert isinstance(calls[0][0], LayeredDecoder)
    assert len(eager) == len(compiled_samples) == 12
    for completion, other in zip(eager, compiled_samples, strict=True):
        assert completion.token_ids.tobytes() == other.token_ids.tobytes()
        assert completion.logprobs.tobytes() == other.logprobs.tobytes()


@pytest.mark.parametrize("kind", ["qwen3", "gemma2"])
def test_tokens_that_are_read_a_step_late_are_the_same(kind, model, prompt, tokenizer):
    asked = mixed(prompt)
    at_once, stats = sampled(model, tokenizer, asked, kind)
    late, late_stats = sampled(model, tokenizer, asked, kind, ahead=1)
    assert len(at_once) == len(late) > 20
    for completion, other in zip(at_once, late, strict=True):
        assert (completion.ticket, completion.sample) == (other.ticket, other.sample)
        assert completion.token_ids.tolist() == other.token_ids.tolist()
        assert (completion.finish_reason, completion.text) == (other.finish_reason, other.text)
        assert completion.versions == other.versions
        # Other rows share the batch, so that products round differently.
        np.testing.assert_allclose(completion.logprobs, other.logprobs, atol=2e-5)
    assert stats.response_tokens == late_stats.response_tokens
    assert stats.decode_steps < late_stats.decode_steps


def test_as_long_as_no_row_takes_anothers_place_late_tokens_have_the_same_bits(
    model, prompt, tokenizer
):
    asked = [
        Request(ticket, (0, 1, 2), prompt(ticket, 9), SamplingSettings(max_new_tokens=12))
        for ticket in range(8)
    ]
    for request in asked:  # no row ends before the others
        assert request.sampling.max_new_tokens == 12
    engines = []
    for ahead in (0, 1):
        engine = LocalEngine(model("qwen3"), tokenizer, slots=24, cache_tokens=24 * 48)
        engine._stopper._eos = np.array([-1])
        engine._ahead = ahead
        engines.append(generate(engine, asked))
    assert_same_bits(*engines)


def test_weights_that_come_between_steps_find_every_token_read(model, prompt, tokenizer):
    engine = LocalEngine(model("qwen3"), tokenizer, slots=9, cache_tokens=9 * 64)
    engine._ahead = 1
    engine._stopper._eos = np.array([-1])
    for request in requests(prompt)[:3]:  # six rows
        engine.submit(request)
    assert engine.advance() == []
    assert engine._rows.written[0] == 0
    engine.advance()
    assert engine._rows.written[0] == 1
    engine.load_weights(model("qwen3", seed=1).named_parameters(), 1)
    assert engine._rows.written[0] == 2
    done = generate(engine, [])
    assert {completion.versions[0] for completion in done} == {(0, 2)}
    assert all(completion.versions[1][0] == 1 for completion in done)


@pytest.mark.parametrize("publish", [False, True])
def test_a_row_that_ends_before_a_cut_or_a_publish_makes_room_for_another(
    publish, model, prompt, tokenizer
):
    """Its last token is read then, outside of a step, and what the other row keeps is moved."""
    engine = LocalEngine(model("qwen3"), tokenizer, slots=3, cache_tokens=3 * 64)
    engine._ahead = 1
    engine._stopper._eos = np.array([-1])
    for ticket, limit in enumerate((3, 9, 9)):
        sampling = SamplingSettings(max_new_tokens=limit)
        engine.submit(Request(ticket, (0,), prompt(ticket, 5), sampling))
    for _ in range(3):
        assert engine.advance() == []
    if publish:
        engine.load_weights(model("qwen3", seed=1).named_parameters(), 1)
        assert engine._rows.ticket[:2].tolist() == [2, 1]
    written = {request.ticket: request.position for request in engine.cut()}
    assert written == {1: 3, 2: 3}
    assert [completion.ticket for completion in engine.completed()] == [0]


@pytest.mark.parametrize("ahead", [0, 1])
def test_what_diverged_weights_left_is_in_no_later_sample(ahead, model, prompt, tokenizer):
    """Neither in a step that is not read yet, nor in the cache behind a shorter prompt."""

    def asked(*lengths):
        sampling = SamplingSettings(max_new_tokens=6)
        return [Request(t, (0,), prompt(t, length), sampling) for t, length in enumerate(lengths)]

    engine = LocalEngine(model("qwen3"), tokenizer, slots=2, cache_tokens=2 * 640)
    engine._ahead = ahead
    expected = generate(engine, asked(510, 5))  # computed one after the other
    broken = model("qwen3", seed=1)
    for parameter in broken.parameters():
        parameter.data.fill_(torch.nan)
    engine.load_weights(broken.named_parameters(), 1)
    with pytest.raises(RunError, match="not finite"):
        generate(engine, asked(510, 510))
    assert len(engine.cut()) == 2
    engine.load_weights(model("qwen3").named_parameters(), 2)
    for completion, before in zip(generate(engine, asked(510, 5)), expected, strict=True):
        assert completion.token_ids.tolist() == before.token_ids.tolist()
        assert completion.logprobs.tobytes() == before.logprobs.tobytes()


class Graph:
    """In place of a CUDA graph: runs the step that it stands for."""

    def __init__(self, *arguments):
        self.replay = lambda: step_module.step(*arguments)


@pytest.fixture
def captured(monkeypatch):
    """The shapes of steps that were captured, in order; CPUs capture too."""
    shapes = []

    class CapturingStepper(Stepper):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            self._captures = True

        def _captured(self, shape):
            shapes.append(shape)
            return Graph(self._decoder, self._cache, self._buffers, shape)

    monkeypatch.setattr(engine_module, "Stepper", CapturingStepper)
    return shapes


def endless(model, tokenizer, **settings):
    """An engine whose samples end at their limits: any weights have the same steps."""
    engine = LocalEngine(model, tokenizer, slots=9, cache_tokens=9 * 64, **settings)
    engine._stopper._eos = np.array([-1])
    return engine


def with_graphs(model, tokenizer, asked, **settings):
    """An engine that has seen all shapes of `asked` twice."""
    engine = endless(model("qwen3"), tokenizer, **settings)
    for _ in range(2):
        generate(engine, asked)
    return engine


def test_graphs_outlast_a_publish_in_place_and_read_the_new_weights(
    captured, model, prompt, tokenizer
):
    asked = requests(prompt)
    engine = with_graphs(model, tokenizer, asked)
    assert len(captured) == len(set(captured)) > 5
    captured.clear()
    engine.load_weights(model("qwen3", seed=1).named_parameters(), 1)
    done = generate(engine, asked)
    assert captured == []
    assert len(engine._stepper._graphs) > 5
    fresh = endless(model("qwen3", seed=1), tokenizer)
    assert_same_bits(done, generate(fresh, asked))


def test_graphs_write_sampling_masks_where_the_steps_before_them_did(
    captured, model, prompt, tokenizer, monkeypatch
):
    asked = [replace(request, keeps_mask=True) for request in mixed(prompt)]
    engine = with_graphs(model, tokenizer, asked)
    place = engine._stepper._buffers.left.data_ptr()
    done = generate(engine, asked)
    assert any(shape.kind.keeps for shape in captured)
    assert engine._stepper._buffers.left.data_ptr() == place
    monkeypatch.setattr(engine_module, "Stepper", Stepper)
    plain = generate(endless(model("qwen3"), tokenizer), asked)
    for completion, other in zip(done, plain, strict=True):
        assert [m.tolist() for m in completion.sampling_mask] == [
            m.tolist() for m in other.sampling_mask
        ]
    assert any(completion.sampling_mask.lengths.any() for completion in done)


@pytest.mark.slow
def test_graphs_of_weights_that_are_elsewhere_now_are_dropped(captured, model, prompt, tokenizer):
    engine = with_graphs(model, tokenizer, asked := requests(prompt), borrows=True)
    before = set(captured)
    engine.load_weights(model("qwen3", seed=1).named_parameters(), 1)  # norms are borrowed
    captured.clear()
    for _ in range(2):
        generate(engine, asked)
    assert set(captured) == before


def test_graphs_that_follow_dropped_ones_have_a_pool_of_their_own(
    model, prompt, tokenizer, monkeypatch
):
    """torch refuses to capture into a pool all of whose graphs are gone."""
    pools = []

    @contextmanager
    def captures(graph, *, pool, capture_error_mode):
        pools.append(pool)
        yield

    class CapturingStepper(Stepper):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            self._captures = True

    monkeypatch.setattr(engine_module, "Stepper", CapturingStepper)
    monkeypatch.setattr(torch.cuda, "graph", captures)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", object)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: SimpleNamespace(replay=lambda: None))
    asked = [Request(0, (0,), prompt(0, 5), SamplingSettings(max_new_tokens=6))]
    engine = with_graphs(model, tokenizer, asked, borrows=True)
    first = set(pools)
    pools.clear()
    engine.load_weights(model("qwen3", seed=1).named_parameters(), 1)  # norms are borrowed
    generate(engine, asked)
    assert len(first) == len(set(pools)) == 1
    assert first.isdisjoint(pools)


@pytest.mark.slow
def test_graphs_of_a_cache_that_is_freed_or_divided_anew_are_dropped(
    captured, model, prompt, tokenizer
):
    engine = with_graphs(model, tokenizer, asked := requests(prompt))
    before = set(captured)
    engine.sleep()
    assert not engine._stepper._graphs
    captured.clear()
    for _ in range(2):
        generate(engine, asked)
    assert set(captured) == before
    divided = engine._stepper
    generate(engine, [Request(0, (0,), prompt(0, 9), SamplingSettings(max_new_tokens=50))])
    assert engine._stepper is not divided


def test_results_follow_rows_that_move_and_leave_out_rows_that_ended():
    results = torch.tensor([[10, 11, 12, 13], [0, 0, 0, 0]], dtype=torch.int32)
    left = torch.zeros(4, 8, dtype=torch.uint8)
    left[3, 1] = 0b101  # the bits of tokens 8 and 10
    flight = Flight(np.arange(4), results, None, None, left)
    flight.move(np.array([0, 2]), np.array([0]), np.array([3]))  # 1 stays, 3 becomes 0
    flight.move(np.array([1]), np.zeros(0, np.int64), np.zeros(0, np.int64))
    rows, tokens, logprobs, experts, masks = flight.read()
    assert experts is None
    assert masks is not None
    assert [mask.tolist() for mask in masks] == [[8, 10]]
    assert (rows.tolist(), tokens.tolist(), logprobs.tolist()) == ([0], [13], [0.0])


def test_on_cuda_tokens_are_read_a_step_late_and_on_a_cpu_at_once():
    assert engine_module.AHEAD == {"cpu": 0, "cuda": 1}
