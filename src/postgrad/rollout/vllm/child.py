"""The process that samples with vLLM. entry.py starts it, protocol.py has its messages.

It runs in vLLM's environment, which lacks postgrad's dependencies, so it imports only the standard
library, vLLM and modules that need no more. It handles messages between two steps of the engine; a
thread reads them, so that neither side ever waits for the other to empty a pipe.
"""

import base64
import hashlib
import json
import math
import os
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from importlib import import_module
from pathlib import Path
from queue import SimpleQueue
from subprocess import PIPE
from typing import Any, BinaryIO

import numpy as np

from postgrad.core.process import die_with_parent, take_pipes, write
from postgrad.rollout.vllm.inputs import PromptInputs, Shown, engine_arguments
from postgrad.rollout.vllm.protocol import SampledTokens, Start, line

ControlMessage = dict[str, Any]
Inbox = SimpleQueue[ControlMessage | None]  # None: the controller has closed the pipe
# The program of a process that waits until this one ends, however it ends, and removes its folder.
TIDIES = "import shutil, sys; sys.stdin.read(); shutil.rmtree(sys.argv[1], ignore_errors=True)"
ADAPTER_WEIGHTS = "adapter_model.safetensors"


def main() -> None:
    """Sample until the pipe closes, then end at once: an orderly exit takes 3 s of CPU time."""
    code = 0
    try:
        _serve()
    except SystemExit:  # _work has told the controller why
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _serve() -> None:
    die_with_parent()
    requests, answers = take_pipes()
    start = Start(**json.loads(requests.readline()))
    inbox: Inbox = SimpleQueue()
    threading.Thread(target=_read, args=(requests, inbox), daemon=True).start()
    with subprocess.Popen([sys.executable, "-IS", "-c", TIDIES, start.folder], stdin=PIPE):
        _work(start, inbox, answers)


def _work(start: Start, inbox: Inbox, answers: BinaryIO) -> None:
    def tell(message: Mapping[str, Any]) -> None:
        write(answers, line(message))

    try:
        server = EngineServer(start, tell)
        tell({"ready": server.facts()})
        server.run(inbox)
        server.close()
    except (Exception, SystemExit) as error:  # of vLLM, any type; the controller ends the run
        traceback.print_exc()
        tell({"failed": f"{type(error).__name__}: {error}"})
        raise SystemExit(1) from error


class EngineServer:
    """One vLLM engine, driven by the controller's messages."""

    def __init__(self, start: Start, tell: Callable[[Mapping[str, Any]], None]) -> None:
        args = _vllm().EngineArgs(**engine_arguments(start))
        with _temporary_files(start.folder):
            self._engine: Any = _vllm().LLMEngine.from_engine_args(args)
        take_names_away(start.folder)
        self._prompts = PromptInputs(self._engine)
        self._reads_images = start.images
        self._experts = start.experts
        self._engine.collective_rpc("init_weight_transfer_engine", kwargs={"init_info": {}})
        self._tell = tell
        self._seeded = start.seeded
        self._version = 0
        self._adapter: Any = None  # that all requests are computed with; None: the plain model
        # [version, tokens] of samples in flight, older versions
        self._spans: dict[str, list[list[int]]] = {}
        self._loading = False  # between the start of a publish and its end
        self._diverged = False  # the cache has keys or values that are not finite

    def facts(self) -> dict[str, Any]:
        """{"vllm": version, "cache_tokens": token places}, for the controller's log."""
        cache = self._engine.vllm_config.cache_config
        return {
            "vllm": _vllm().__version__,
            "cache_tokens": (cache.num_gpu_blocks or 0) * cache.block_size,
        }

    def run(self, inbox: Inbox) -> None:
        """Handle messages and sample until the controller closes the pipe. Nothing is computed
        while weights are loaded: vLLM has moved some of the old ones out of the way.
        """
        while True:
            for message in _waiting(inbox, wait=not self._samples):
                if message is None:
                    return
                self._do(message)
            if self._samples:
                self._step()

    @property
    def _samples(self) -> bool:
        """Whether a step can be computed now."""
        return not self._loading and self._engine.has_unfinished_requests()

    def close(self) -> None:
        """Shut down vLLM's engine and its workers."""
        self._engine.engine_core.shutdown()

    def _do(self, message: ControlMessage) -> None:
        action = message.pop("do")
        if action == "sample":
            self._sample(**message)
            return
        call = message.pop("call")
        self._tell({"done": call, "value": self._calls()[action](**message)})

    def _calls(self) -> dict[str, Callable[..., Any]]:
        rpc = self._engine.collective_rpc
        return {
            "score": self._score,
            "places": partial(rpc, "place"),
            "meet": lambda meeting, first: rpc("meet", args=(meeting, first)),
            "cut": self._cut,
            "start_weights": self._start_weights,
            "load_weights": lambda parcel: rpc(
                "update_weights", kwargs={"update_info": {"parcel": parcel}}
            ),
            "finish_weights": self._finish_weights,
            "load_adapter": self._load_adapter,
            "sleep": self._sleep,
            "wake": self._wake,
        }

    def _sample(
        self,
        keys: list[int],
        seeds: list[int],
        prompt: list[int],
        sampling: ControlMessage,
        pixels: str = "",
        images: Sequence[Shown] = (),
    ) -> None:
        """Add a request for each sample, each with its own seed, so that its tokens do not depend
        on the rest of the batch. vLLM draws for each such row by itself; without seeds, for all of
        them in one kernel. The prompt is computed once (vLLM's prefix cache), its images too.
        """
        (prompt_input,) = self._prompts.of([prompt], pixels, images)
        if grammar := sampling.pop("structured_outputs", None):
            params_of = _vllm(".sampling_params").StructuredOutputsParams
            sampling["structured_outputs"] = params_of(**grammar)
        for key, seed in zip(keys, seeds, strict=True):
            params = _vllm().SamplingParams(
                **sampling,
                seed=seed if self._seeded else None,
                ignore_eos=True,  # the tokens that end a sample are all in stop_token_ids
                logprobs=0,
                flat_logprobs=True,
                detokenize=bool(sampling["stop"]),
                skip_special_tokens=False,  # a stop string may be a special token's text
                output_kind=_final_only(),
            )
            self._spans[str(key)] = []
            self._add(str(key), prompt_input, params)

    def _add(self, name: str, prompt: dict[str, Any], params: Any) -> None:
        adapter = {} if self._adapter is None else {"lora_request": self._adapter}
        self._engine.add_request(name, prompt, params, **adapter)

    def _step(self) -> None:
        for output in self._engine.step():
            if output.finished:
                self._tell(asdict(self._sampled(output)))

    def _sampled(self, output: Any) -> SampledTokens:
        sample = output.outputs[0]
        if sample.finish_reason not in ("stop", "length"):
            raise RuntimeError(f"sample {output.request_id} ended with {sample.finish_reason}")
        tokens = [int(token) for token in sample.token_ids]
        logprobs = [float(value) for value in sample.logprobs.logprobs]
        stopped = sample.finish_reason == "stop"
        experts = [sample.routed_experts] if self._experts else []
        return self._written_by(output.request_id, tokens, logprobs, experts, stopped=stopped)

    def _written_by(
        self,
        name: str,
        tokens: list[int],
        logprobs: list[float],
        experts: Sequence[Any],
        *,
        stopped: bool,
    ) -> SampledTokens:
        """What the sample `name`, which is not in flight any more, has written. experts: arrays
        [tokens, layers, k] one behind the other, where they are recorded.
        """
        self._watch(logprobs)
        if len(logprobs) != len(tokens):
            raise RuntimeError(f"{len(tokens)} tokens came with {len(logprobs)} logprobs")
        spans = self._spans.pop(name)
        left = len(tokens) - sum(count for _, count in spans)
        versions = [*spans, [self._version, left]] if left else spans
        routed = ""
        if self._experts and tokens:
            if any(part is None for part in experts):
                raise RuntimeError(f"sample {name} came without the experts of its tokens")
            rows = np.concatenate(experts).astype(np.uint16)
            routed = base64.b64encode(rows.tobytes()).decode()
        return SampledTokens(int(name), tokens, logprobs, stopped, versions, routed)

    def _in_flight(self) -> list[tuple[str, list[int], list[float], list[Any]]]:
        """(name, tokens, logprobs, experts) of each sample that has not ended, as far as it is
        written.
        """
        samples: list[tuple[str, list[int], list[float], list[Any]]] = []
        for state in self._engine.output_processor.request_states.values():
            tokens = [int(token) for token in state.detokenizer.output_token_ids]
            logprobs = state.logprobs_processor.logprobs  # None before the first token
            values = [float(value) for value in logprobs.logprobs] if tokens else []
            # vLLM's own names of requests have a suffix
            experts = list(state.routed_experts_chunks) if self._experts else []
            samples.append((state.external_req_id, tokens, values, experts))
        return samples

    def _cut(self) -> list[dict[str, Any]]:
        """Stops all samples. Returns what each has written, as SampledTokens."""
        written = [self._written_by(*sample, stopped=False) for sample in self._in_flight()]
        self._engine.abort_request([str(sampled.key) for sampled in written])
        return [asdict(sampled) for sampled in written]

    def _watch(self, logprobs: Iterable[float]) -> None:
        """Notes logprobs that are not finite: then the weights have diverged, and the cache has
        keys and values that no masking removes, as 0 times NaN is NaN.
        """
        self._diverged |= not all(map(math.isfinite, logprobs))

    def _score(
        self,
        sequences: list[list[int]],
        temperature: float,
        pixels: str = "",
        images: Sequence[Shown] = (),
    ) -> list[list[float]]:
        """The logprob of each token of each sequence in nats, 0 for the first. The controller cuts
        samples in flight before, which would be drawn at this temperature.
        """
        if self._spans:
            raise RuntimeError(f"{len(self._spans)} samples are in flight while tokens are scored")
        params = _vllm().SamplingParams(
            max_tokens=1,
            temperature=0.0,
            prompt_logprobs=0,
            detokenize=False,
            output_kind=_final_only(),
        )
        scores: dict[str, list[float]] = {}
        with self._scored_at(temperature):
            for number, prompt in enumerate(self._prompts.of(sequences, pixels, images)):
                self._add(f"score-{number}", prompt, params)
            while self._engine.has_unfinished_requests():
                for output in self._engine.step():
                    rows = zip(output.prompt_token_ids, output.prompt_logprobs, strict=True)
                    scored = [float(row[token].logprob) if row else 0.0 for token, row in rows]
                    self._watch(scored)
                    scores[output.request_id] = scored
        return [scores[f"score-{number}"] for number in range(len(sequences))]

    @contextmanager
    def _scored_at(self, temperature: float) -> Iterator[None]:
        """Within it logits are divided by `temperature`: vLLM scores a prompt at 1 only."""
        self._engine.collective_rpc("divide_logits", args=(temperature,))
        try:
            yield
        finally:
            self._engine.collective_rpc("divide_logits", args=(1.0,))

    def _sleep(self, level: int) -> bool:
        """Frees the device: at level 1 weights are kept in host memory, at level 2 dropped. Returns
        whether the engine sleeps now.
        """
        self._engine.sleep(level=level)
        return self._engine.is_sleeping()

    def _wake(self, part: str) -> bool:
        """Takes the memory of a part again, "weights" or "kv_cache". Returns whether the engine
        still sleeps: it samples once both parts are awake.
        """
        self._engine.wake_up(tags=[part])
        return self._engine.is_sleeping()

    def _start_weights(self) -> None:
        self._loading = True
        self._engine.collective_rpc("start_weight_update")

    def _finish_weights(self, version: int, manifest: Mapping[str, Any]) -> None:
        """Switch to the new weights, once every worker has all of the manifest."""
        self._engine.collective_rpc("require_complete", args=(dict(manifest),))
        self._engine.collective_rpc("finish_weight_update")
        self._switch_to(version)

    def _load_adapter(self, path: str, sha256: str, version: int) -> None:
        """Switch to the adapter of PEFT's directory `path`, which is read at once. It has one
        number for all versions, so that samples in flight go on with the newest.
        """
        written = (Path(path) / ADAPTER_WEIGHTS).read_bytes()
        if hashlib.sha256(written).hexdigest() != sha256:
            raise RuntimeError(f"{path} does not hold the adapter that was sent")
        request = _vllm(".lora.request").LoRARequest
        named = {"lora_name": "policy", "lora_int_id": 1, "lora_path": path}
        if not self._engine.add_lora(request(**named, load_inplace=True)):
            raise RuntimeError(f"vLLM does not take the adapter {path}")
        self._adapter = request(**named)  # one that is read again in every step would be slow
        self._switch_to(version)

    def _switch_to(self, version: int) -> None:
        """Later tokens get `version`. Keys and values of the old weights are dropped, and those of
        samples in flight computed again.
        """
        for name, tokens, logprobs, _ in self._in_flight():
            self._watch(logprobs)
            spans = self._spans[name]
            written = len(tokens) - sum(count for _, count in spans)
            if written:
                spans.append([self._version, written])
        self._engine.set_weight_version(str(version))
        self._version, self._loading = version, False
        if not self._engine.reset_prefix_cache(reset_running_requests=True):
            raise RuntimeError("keys and values of the old weights could not be dropped")
        if self._reads_images:
            self._engine.reset_encoder_cache()  # features of images, by the old weights
        if self._diverged and not self._engine.is_sleeping():  # a cache that wakes has new memory
            self._engine.collective_rpc("clear_cache")
        self._diverged = False


@contextmanager
def _temporary_files(folder: str) -> Iterator[None]:
    """Within it this process makes temporary files in `folder`, such as the file at which vLLM's
    workers meet. Compiled kernels of torch stay where the next engine finds them.
    """
    tempfile.tempdir = folder or None
    try:
        yield
    finally:
        tempfile.tempdir = None


def take_names_away(folder: str) -> None:
    """Unlink the shared memory of vLLM's CPU workers once all have opened it, so that it is freed
    with them, however they end. It is named after the file at which they met.
    """
    for meeting in Path(folder).glob("vllm_dist_*"):
        for memory in Path("/dev/shm").glob(f"{meeting.name}-*"):
            memory.unlink()


def _vllm(module: str = "") -> Any:
    """A module of vLLM, imported late: the controller's environment lacks it."""
    return import_module(f"vllm{module}")


def _final_only() -> Any:
    return _vllm(".sampling_params").RequestOutputKind.FINAL_ONLY


def _waiting(inbox: Inbox, *, wait: bool) -> Iterator[ControlMessage | None]:
    """The messages that have arrived; with `wait`, at least one."""
    if wait:
        yield inbox.get()
    while not inbox.empty():
        yield inbox.get()


def _read(requests: BinaryIO, inbox: Inbox) -> None:
    for text in requests:
        inbox.put(json.loads(text))
    inbox.put(None)
