"""The side of the process, over an engine that is asked as vLLM's is and counts."""

import base64
import hashlib
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from postgrad.rollout.vllm import child
from postgrad.rollout.vllm.child import EngineServer
from postgrad.rollout.vllm.inputs import engine_arguments
from postgrad.rollout.vllm.protocol import Start

START = Start("a model", "bfloat16", 40, 4, 1 << 20, 2, 0.25, True, False, True)


class LogprobsSoFar:
    """What vLLM keeps of a request in flight: nothing before its first token."""

    def __init__(self, written: list[int]) -> None:
        self._written = written

    @property
    def logprobs(self) -> Any:
        if not self._written:
            return None
        return SimpleNamespace(logprobs=[-1.0] * len(self._written))


class Counting:
    """Writes one token a step to every request: its step's number."""

    def __init__(self, arguments: Any) -> None:
        self.arguments = arguments
        self.calls: list[Any] = []
        self.running: dict[str, Any] = {}
        self.cache_emptied = True
        self.asleep: set[str] = set()
        self.adapters: list[Any] = []  # that requests are computed with
        self.refused = ""  # the path of an adapter
        self.vllm_config = SimpleNamespace(
            cache_config=SimpleNamespace(num_gpu_blocks=3, block_size=16)
        )
        self.output_processor = SimpleNamespace(request_states={})
        self.chunks: list[Any] = []  # the experts of samples in flight, step by step

    def routed(self, tokens: int) -> Any:
        """As vLLM's experts [tokens, layers, k]: every number once."""
        if "enable_return_routed_experts" not in self.arguments:
            return None
        return np.arange(tokens * 4, dtype=np.uint8).reshape(tokens, 2, 2)

    def collective_rpc(self, name: str, args: Any = (), kwargs: Any = None) -> None:
        self.calls.append((name, *args, *(kwargs or {}).values()))

    def add_lora(self, request: Any) -> bool:
        self.calls.append(("lora", request.lora_path, request.load_inplace))
        return request.lora_path != self.refused

    def add_request(self, name: str, prompt: Any, params: Any, lora_request: Any = None) -> None:
        self.adapters.append(lora_request and lora_request.lora_path)
        written: list[int] = []
        self.running[name] = (prompt["prompt_token_ids"], params, written)
        self.output_processor.request_states[f"{name}-suffix"] = SimpleNamespace(
            external_req_id=name,
            detokenizer=SimpleNamespace(
                num_output_tokens=lambda: len(written), output_token_ids=written
            ),
            logprobs_processor=LogprobsSoFar(written),
            routed_experts_chunks=self.chunks,
        )

    def abort_request(self, names: list[str]) -> None:
        for name in names:
            del self.running[name], self.output_processor.request_states[f"{name}-suffix"]

    def has_unfinished_requests(self) -> bool:
        return bool(self.running)

    def step(self) -> list[Any]:
        done: list[Any] = []
        for name, (prompt, params, written) in list(self.running.items()):
            written.append(len(written))
            if len(written) < params.max_tokens:
                continue
            del self.running[name], self.output_processor.request_states[f"{name}-suffix"]
            sample = SimpleNamespace(
                token_ids=written,
                logprobs=SimpleNamespace(logprobs=[-1.0] * len(written)),
                finish_reason=getattr(params, "ends", "length"),
                routed_experts=self.routed(len(prompt) + len(written) - 1),
            )
            scores = [None, *({token: SimpleNamespace(logprob=-token)} for token in prompt[1:])]
            done.append(
                SimpleNamespace(
                    request_id=name,
                    finished=True,
                    outputs=[sample],
                    prompt_token_ids=prompt,
                    prompt_logprobs=scores,
                )
            )
        return done

    def set_weight_version(self, version: str) -> None:
        self.calls.append(("version", version))

    def sleep(self, level: int) -> None:
        self.calls.append(("sleep", level))
        self.asleep = {"weights", "kv_cache"}

    def wake_up(self, tags: list[str]) -> bool:
        self.calls.append(("wake", *tags))
        self.asleep -= set(tags)
        return not self.asleep

    def is_sleeping(self) -> bool:
        return bool(self.asleep)

    def reset_prefix_cache(self, reset_running_requests: bool) -> bool:
        return self.cache_emptied and reset_running_requests


def numbers_of(experts: str) -> list[int]:
    return np.frombuffer(base64.b64decode(experts), np.uint16).tolist()


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Any:
    """(server, its engine, what it told)."""
    fake = SimpleNamespace(
        __version__="0.0",
        EngineArgs=lambda **arguments: arguments,
        LLMEngine=SimpleNamespace(from_engine_args=Counting),
        SamplingParams=lambda **params: SimpleNamespace(**params),
        LoRARequest=lambda load_inplace=False, **named: SimpleNamespace(
            load_inplace=load_inplace, **named
        ),
        RequestOutputKind=SimpleNamespace(FINAL_ONLY="final"),
    )
    monkeypatch.setattr(child, "_vllm", lambda module="": fake)
    replies: list[Any] = []
    server = EngineServer(START, replies.append)
    return server, server._engine, replies


@pytest.fixture
def told_by_recording(served: Any) -> Any:
    """As `served`, of an engine that records experts."""
    replies: list[Any] = []
    server = EngineServer(replace(START, experts=True), replies.append)
    return server, server._engine, replies


def sample(*keys: int, most: int = 3, **more: Any) -> dict[str, Any]:
    sampling = {"max_tokens": most, "stop": [], **more}
    seeds = [10 + key for key in keys]
    return {
        "do": "sample",
        "keys": list(keys),
        "seeds": seeds,
        "prompt": [5, 6],
        "sampling": sampling,
    }


def ask(server: EngineServer, *messages: dict[str, Any] | None) -> None:
    """Everything at once, then the end."""
    inbox: child.Inbox = child.SimpleQueue()
    for message in (*messages, None):
        inbox.put(message)
    server.run(inbox)


def finish(server: EngineServer, version: int) -> None:
    server._do({"do": "finish_weights", "call": version, "version": version, "manifest": {}})


def test_samples_come_with_the_experts_of_the_prompt_and_of_all_tokens_but_the_newest(
    served: Any, told_by_recording: Any
) -> None:
    server, engine, replies = told_by_recording
    server._do(sample(1))
    while engine.running:
        server._step()
    assert numbers_of(replies[-1]["experts"]) == list(range(4 * 4))
    engine.chunks = [engine.routed(2), None]
    server._do(sample(2, most=9))
    engine.step()
    with pytest.raises(RuntimeError, match="sample 2 came without the experts of its tokens"):
        server._cut()
    engine.chunks[:] = [engine.routed(2)]
    server._spans["2"] = []
    (cut,) = server._cut()
    assert numbers_of(cut["experts"]) == list(range(2 * 4))
    plain, _, plain_replies = served
    plain._do(sample(3))
    while plain._engine.running:
        plain._step()
    assert plain_replies[-1]["experts"] == ""


def test_samples_without_seeds_are_drawn_together(served: Any) -> None:
    _, engine, replies = served
    server = EngineServer(replace(START, seeded=False), replies.append)
    server._do(sample(1, 2))
    assert [params.seed for _, params, _ in server._engine.running.values()] == [None, None]
    assert engine.arguments["seed"] == 0 != server._engine.arguments["seed"]


def test_a_request_becomes_samples_with_seeds_of_their_own(served: Any) -> None:
    server, engine, replies = served
    server._do(sample(1, 2, temperature=0.5))
    first, second = (params for _, params, _ in engine.running.values())
    assert (first.seed, second.seed) == (11, 12)
    assert (first.temperature, first.max_tokens, first.logprobs) == (0.5, 3, 0)
    assert first.ignore_eos
    assert not first.detokenize
    for _ in range(3):
        server._step()
    assert replies == [
        {
            "key": key,
            "tokens": [0, 1, 2],
            "logprobs": [-1.0] * 3,
            "stopped": False,
            "versions": [[0, 3]],
            "experts": "",
        }
        for key in (1, 2)
    ]


def test_what_is_in_flight_when_weights_come_is_named_span_by_span(served: Any) -> None:
    server, engine, replies = served
    server._do(sample(1, most=5))
    for version in (3, 4, 8):
        server._step()
        finish(server, version)
    finish(server, 9)  # nothing was written since
    server._step()
    server._step()
    assert replies[-1]["versions"] == [[0, 1], [3, 1], [4, 1], [9, 2]]
    assert ("version", "9") in engine.calls


def test_keys_and_values_that_stay_are_an_error(served: Any) -> None:
    server, engine, _ = served
    engine.cache_emptied = False
    with pytest.raises(RuntimeError, match="could not be dropped"):
        finish(server, 1)


def test_parcels_go_to_every_worker_and_are_counted_before_they_count(served: Any) -> None:
    server, engine, replies = served
    manifest = {"parcels": 1}
    ask(
        server,
        {"do": "start_weights", "call": 1},
        {"do": "load_weights", "call": 2, "parcel": {"number": 0}},
        {"do": "finish_weights", "call": 3, "version": 4, "manifest": manifest},
    )
    assert engine.calls[1:] == [
        ("start_weight_update",),
        ("update_weights", {"parcel": {"number": 0}}),
        ("require_complete", manifest),
        ("finish_weight_update",),
        ("version", "4"),
    ]
    assert [reply["done"] for reply in replies] == [1, 2, 3]


def test_tokens_are_scored_at_the_temperature_and_sampling_is_left_alone(served: Any) -> None:
    server, engine, replies = served
    ask(server, {"do": "score", "call": 4, "sequences": [[7, 8, 9], [3]], "temperature": 0.5})
    assert replies == [{"done": 4, "value": [[0.0, -8.0, -9.0], [0.0]]}]
    assert engine.calls[-2:] == [("divide_logits", 0.5), ("divide_logits", 1.0)]


def test_it_wakes_part_by_part_and_tells_whether_it_still_sleeps(served: Any) -> None:
    server, engine, replies = served
    parts = ["weights", "kv_cache"]
    wakes = [{"do": "wake", "call": 2, "part": part} for part in parts]
    ask(server, {"do": "sleep", "call": 1, "level": 2}, *wakes)
    assert engine.calls[1:] == [("sleep", 2), ("wake", "weights"), ("wake", "kv_cache")]
    assert [reply["value"] for reply in replies] == [True, True, False]


def test_a_sample_that_vllm_gave_up_is_an_error(served: Any) -> None:
    server, _, _ = served
    server._do(sample(1, most=1, ends="abort"))
    with pytest.raises(RuntimeError, match="sample 1 ended with abort"):
        server._step()


def test_it_ends_when_the_controller_has_gone(served: Any) -> None:
    server, engine, replies = served
    ask(server, sample(1))
    assert replies == []
    assert engine.has_unfinished_requests()


def test_vllm_is_started_as_it_is_told(served: Any) -> None:
    server, engine, _ = served
    arguments = engine_arguments(START)
    assert engine.arguments == arguments
    assert arguments["logprobs_mode"] == "processed_logprobs"
    assert (
        arguments["generation_config"] == "vllm"
    )  # not the model's: the recipe says how to sample
    assert arguments["max_model_len"] == 41
    assert arguments["tensor_parallel_size"] == 2
    assert arguments["trust_remote_code"] is False
    assert not arguments["enable_chunked_prefill"]
    assert arguments["max_num_batched_tokens"] >= arguments["max_model_len"]
    assert server.facts() == {"vllm": "0.0", "cache_tokens": 48}


def test_arguments_of_the_recipe_come_to_those_of_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    @dataclass
    class EngineArgs:
        kv_cache_dtype: str = "auto"
        block_size: int = 16

    fake = SimpleNamespace(EngineArgs=EngineArgs, __version__="0.32")
    monkeypatch.setitem(sys.modules, "vllm", fake)
    arguments = engine_arguments(replace(START, more={"kv_cache_dtype": "fp8"}))
    assert arguments == {**engine_arguments(START), "kv_cache_dtype": "fp8"}
    with pytest.raises(ValueError, match=r"vLLM 0\.32 has no argument 'blocksize'; did you mean"):
        engine_arguments(replace(START, more={"blocksize": 32}))


def test_weights_and_tokenizer_of_a_hub_id_are_of_one_revision() -> None:
    arguments = engine_arguments(replace(START, revision="v1"))
    assert (arguments["model"], arguments["revision"], arguments["tokenizer_revision"]) == (
        "a model",
        "v1",
        "v1",
    )
    assert engine_arguments(START)["revision"] is None


def test_vllm_looks_for_stop_strings_in_text_with_special_tokens(served: Any) -> None:
    server, engine, _ = served
    server._sample([0], [10], [5, 6], {"max_tokens": 3, "stop": ["<|im_end|>"]})
    ((_, params, _),) = engine.running.values()
    assert params.detokenize
    assert not params.skip_special_tokens


def test_a_cut_returns_what_was_written_by_version_and_stops_all(served: Any) -> None:
    server, engine, replies = served
    server._do(sample(1, 2, most=9))
    server._step()
    server._finish_weights(4, {})
    server._step()
    server._step()
    server._do(sample(3, most=9))
    server._do({"do": "cut", "call": 7})
    (reply,) = replies
    assert reply["done"] == 7
    spans = {partial["key"]: (partial["tokens"], partial["versions"]) for partial in reply["value"]}
    assert spans == {
        1: ([0, 1, 2], [[0, 1], [4, 2]]),
        2: ([0, 1, 2], [[0, 1], [4, 2]]),
        3: ([], []),
    }
    assert [len(partial["logprobs"]) for partial in reply["value"]] == [3, 3, 0]
    assert not engine.has_unfinished_requests()
    assert server._spans == {}


def test_a_cache_that_diverged_weights_wrote_to_is_cleared_for_the_next(served: Any) -> None:
    """0 times NaN is NaN: what is masked still counts."""
    server, engine, _ = served
    server._do(sample(1, most=2))
    server._step()
    server._finish_weights(1, {})
    assert ("clear_cache",) not in engine.calls
    (state,) = engine.output_processor.request_states.values()
    state.logprobs_processor = SimpleNamespace(logprobs=SimpleNamespace(logprobs=[float("nan")]))
    server._finish_weights(2, {})
    server._finish_weights(3, {})  # the sample in flight has its NaN still
    assert engine.calls.count(("clear_cache",)) == 2
    server._do({"do": "cut", "call": 1})
    server._finish_weights(4, {})
    assert engine.calls.count(("clear_cache",)) == 3
    server._finish_weights(5, {})
    assert engine.calls.count(("clear_cache",)) == 3


def test_tokens_are_not_scored_at_a_temperature_while_samples_are_drawn(served: Any) -> None:
    server, _, replies = served
    server._do(sample(1))
    with pytest.raises(RuntimeError, match="1 samples are in flight"):
        server._score([[1, 2]], 0.7)
    assert replies == []


class OneByOne:
    """An inbox whose messages come with time for a step between two of them."""

    def __init__(self, *messages: dict[str, Any] | None) -> None:
        self._messages = [*messages, None]
        self._came = False

    def empty(self) -> bool:
        self._came = not self._came
        return not self._came

    def get(self) -> dict[str, Any] | None:
        self._came = True
        return self._messages.pop(0)


def test_nothing_is_computed_between_the_start_and_the_end_of_weights(served: Any) -> None:
    """Some weights are not there: vLLM has taken them out of the way."""
    server, _, replies = served
    loads = [{"do": "load_weights", "call": call, "parcel": {}} for call in (2, 3)]
    server.run(OneByOne(sample(1, most=9), {"do": "start_weights", "call": 1}, *loads))
    assert [reply["done"] for reply in replies] == [1, 2, 3]
    ((_, tokens, *_),) = server._in_flight()
    before = len(tokens)  # between the sample and the start
    assert before < 3
    finish(server, 3)
    for _ in range(9 - before):
        server._step()
    assert replies[-1]["versions"] == [*([[0, before]] if before else []), [3, 9 - before]]


def adapter_in(folder: Path, version: int) -> dict[str, Any]:
    """The message of a publish."""
    path = folder / str(version)
    path.mkdir()
    (path / "adapter_model.safetensors").write_bytes(bytes([version]))
    digest = hashlib.sha256(bytes([version])).hexdigest()
    named = {"path": str(path), "sha256": digest, "version": version}
    return {"do": "load_adapter", "call": version, **named}


def test_everything_after_a_publish_is_computed_with_the_newest_adapter(
    served: Any, tmp_path: Path
) -> None:
    server, engine, replies = served
    server._do(sample(1))
    server._step()
    for version in (4, 5):
        server._do(adapter_in(tmp_path, version))
    server._do(sample(2))
    while engine.has_unfinished_requests():
        server._step()
    server._do({"do": "score", "call": 9, "sequences": [[3, 4]], "temperature": 1.0})
    newest = str(tmp_path / "5")
    assert engine.adapters == [None, newest, newest]
    assert [call for call in engine.calls if call[0] == "lora"] == [
        ("lora", str(tmp_path / "4"), True),
        ("lora", newest, True),
    ]
    assert [reply["versions"] for reply in replies if "versions" in reply] == [
        [[0, 1], [5, 2]],
        [[5, 3]],
    ]


def test_an_adapter_that_is_damaged_or_refused_is_an_error(served: Any, tmp_path: Path) -> None:
    server, engine, _ = served
    damaged = adapter_in(tmp_path, 1)
    (tmp_path / "1" / "adapter_model.safetensors").write_bytes(b"other")
    with pytest.raises(RuntimeError, match="does not hold the adapter that was sent"):
        server._do(damaged)
    refused = adapter_in(tmp_path, 2)
    engine.refused = refused["path"]
    with pytest.raises(RuntimeError, match="does not take the adapter"):
        server._do(refused)
    assert (server._adapter, server._version) == (None, 0)


def test_vllm_has_room_for_the_adapter_that_it_will_get() -> None:
    arguments = engine_arguments(replace(START, lora_rank=12, lora_targets=("q_proj",)))
    assert (arguments["enable_lora"], arguments["max_loras"], arguments["max_lora_rank"]) == (
        True,
        1,
        16,
    )
    assert arguments["lora_target_modules"] == ["q_proj"]
    assert "enable_lora" not in engine_arguments(START)
