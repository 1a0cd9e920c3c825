"""A rollout engine over one or several vLLM processes.

All samples of a ticket go to one process, so that their prompt is computed once. The tokens drawn
depend on a seed made from (seed, ticket, sample, turn), on the weights and on the prefix, and, up
to rounding, not on the rest of the batch.
"""

import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from postgrad.core.errors import RunError, UsageError
from postgrad.core.seeds import integer
from postgrad.rollout.agreement import agreed
from postgrad.rollout.engine import Completion, EngineStats, Request, Sent, Written, in_order
from postgrad.rollout.settings import SamplingSettings
from postgrad.rollout.transport.route import Stated
from postgrad.rollout.transport.send import LocalSource, send
from postgrad.rollout.vllm.process import STILL_SECONDS, Arrived, Stillness, VLLMProcess
from postgrad.rollout.vllm.protocol import SampledTokens
from postgrad.rollout.vllm.weights import Called, Seats, WeightNames

SILENT_SECONDS = 1.0  # without a message, after which the processes are checked
MARGIN = 4  # tokens decoded before a stop string
PARTS = ("weights", "kv_cache")  # vLLM's names of what sleeps, in the order in which it wakes


@dataclass(frozen=True, slots=True)
class Model:
    """A model without its weights, as the controller needs it."""

    skeleton: nn.Module  # on the meta device: names and shapes of the parameters
    tokenizer: Any
    eos: tuple[int, ...]  # token ids that end a response
    dtype: torch.dtype  # what the engine computes in
    max_len: int  # tokens of the longest sequence, prompt and response


class VLLMEngine:
    """The Engine protocol over vLLM processes, whose messages arrive in one inbox.

    On a learner's devices it sleeps between two publishes: `rest` frees weights and cache,
    `load_weights` takes the memory of the weights, loads them, and then takes that of the cache.
    Whatever fails on this way ends all processes, so that none is left asleep or half awake.
    """

    def __init__(
        self,
        processes: Sequence[VLLMProcess],
        inbox: "SimpleQueue[Arrived]",
        model: Model,
        *,
        level: int = 0,
        learner: torch.device | str = "cpu",
        transport: Stated = "auto",
    ) -> None:
        """level: of vLLM's sleep while the engine rests. 0: it stays awake; 1: weights are kept in
        host memory; 2: they are dropped, and have to be loaded before anything is computed.
        learner: the device that this process's weights come from; transport: the way they go.
        """
        self.stats = EngineStats()
        self._processes = processes
        self._inbox = inbox
        self._model = model
        self._level = level
        self._asleep: tuple[str, ...] = ()  # the parts that sleep, of PARTS
        self._empty = False  # the weights were dropped and not loaded yet
        self._failed = False  # a change between sleep and work has failed
        self._ending = ExitStack()
        self._open: dict[int, tuple[Request, int]] = {}  # by key: the request and its sample
        self._keys = 0
        self._calls = 0
        self._values: dict[tuple[int, int], Any] = {}  # of calls, by process and number
        self._done: list[Completion] = []
        self._seats = Seats(self._each, torch.device(learner), transport)
        self._names = WeightNames(model.skeleton)

    def submit(self, request: Request) -> None:
        """Send a request to the process of its ticket, waking the processes if they sleep."""
        prompt, new = len(request.prefix), request.new_tokens
        if prompt + new > self._model.max_len:
            raise UsageError(
                f"ticket {request.ticket}: a prompt of {prompt} tokens and {new} new ones are more "
                f"than the {self._model.max_len} that vLLM was started for: raise data.max_len or "
                "lower rollout.max_new_tokens"
            )
        request.require_valid()
        self._be_ready()
        keys = range(self._keys, self._keys + len(request.sample_ids))
        self._keys = keys.stop
        self._open |= {
            key: (request, sample) for key, sample in zip(keys, request.sample_ids, strict=True)
        }
        self._processes[request.ticket % len(self._processes)].send(
            {
                "do": "sample",
                "keys": list(keys),
                "seeds": [_seed(request, sample) for sample in request.sample_ids],
                "prompt": request.prefix.tolist(),
                "sampling": self._sampling(request.sampling, new),
            }
        )
        self.stats.prompt_tokens += prompt

    def completed(self, awaited: Collection[int] | None = None) -> list[Completion]:
        """Wait for at least one completion, then take all that have arrived."""
        started = time.perf_counter()
        while self._open and not self._done:
            self._receive()
        self.stats.decode_seconds += time.perf_counter() - started
        while not self._inbox.empty():
            self._receive()
        done, self._done = self._done, []
        return done

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> Sent:
        """Replace all weights; keys and values of samples in flight are computed again. An engine
        that sleeps is awake afterwards.
        """
        with self._changing():
            route, carrier = self._seats.way()
            return send(LocalSource(weights, self._model.dtype, carrier), self, version, route)

    def begin_weights(self) -> None:
        """Target.begin_weights: wakes the weights' memory; the cache's, last, at the commit."""
        self._names.begin()
        with self._changing():
            self._wake("weights")
            self._call("start_weights")

    def take_weights(self, parcel: Mapping[str, Any]) -> Called:
        """Target.take_weights: every process loads the parcel. Raises RunError for a weight that
        the model does not have, or has in another shape.
        """
        with self._changing():
            return self._each("load_weights", [{"parcel": self._names.of(parcel)}])

    def commit_weights(self, version: int, manifest: Mapping[str, Any]) -> None:
        """Target.commit_weights: every process compares what it has with the manifest."""
        with self._changing():
            self._names.require_all()
            self._call("finish_weights", version=version, manifest=dict(manifest))
            self._empty = False
            self._wake("kv_cache")  # last: nothing is computed while weights are loaded

    def logprobs(
        self, sequences: Sequence[NDArray[np.int32]], temperature: float
    ) -> list[NDArray[np.float32]]:
        """[T] nats for each sequence. Every process computes them; raises RunError where one does
        not agree with the first, or while samples are in flight.
        """
        if self.busy:
            raise RunError("vLLM scores tokens only while no samples are in flight")
        self._be_ready()
        token_lists = [np.asarray(sequence).tolist() for sequence in sequences]
        logprobs = [
            [np.array(row, np.float32) for row in value]
            for value in self._call("score", sequences=token_lists, temperature=temperature)
        ]
        return agreed(logprobs, str(self._model.dtype).removeprefix("torch."), "vLLM engine")

    def cut(self) -> list[Request]:
        """Engine.cut. Samples that go on draw from another seed, made from their position too."""
        requests: list[Request] = []
        for samples in self._call("cut") if self._open else ():
            for sampled in (SampledTokens(**fields) for fields in samples):
                request, sample = self._open.pop(sampled.key)
                requests.append(request.cut_after(sample, _turn(request, sampled)))
        return in_order(requests)

    @property
    def busy(self) -> bool:
        """Whether samples are in flight."""
        return bool(self._open)

    def rest(self) -> None:
        """Free the memory of devices that a learner shares, unless samples are in flight: until
        weights are loaded, at level 1 also until the next request.
        """
        if not self._level or self._asleep or self.busy:
            return
        with self._changing():
            self._asleep, self._empty = PARTS, self._level > 1
            asleep = self._call("sleep", level=self._level)
            if not all(asleep):
                raise RunError(f"vLLM engine {asleep.index(False)} does not sleep when it has to")

    def on_close(self, stack: ExitStack) -> None:
        """Sets the stack that `close` unwinds: it ends the processes and removes temporary logs."""
        self._ending = stack

    def close(self) -> None:
        """Ends all processes; the engine cannot be used afterwards."""
        self._ending.close()

    def ready(self, seconds: float) -> list[dict[str, Any]]:
        """Wait until every process can sample; returns the facts that each reports. Raises RunError
        where one fails, is not ready after `seconds`, or where all that are not ready hang.
        """
        deadline, stillness = time.monotonic() + seconds, Stillness()
        while slow := [p for p in self._processes if (p.number, -1) not in self._values]:
            self._receive()
            still = stillness.seconds(process.pid for process in slow)
            if still >= STILL_SECONDS:
                slow[0].kill()
                raise slow[0].error(
                    f"hangs at its start: for {still:.0f} seconds neither it nor anything that it "
                    "started has used a processor"
                )
            if time.monotonic() > deadline:
                slow[0].kill()
                raise slow[0].error(f"was not ready after rollout.vllm.start_seconds = {seconds:g}")
        return [self._values.pop((process.number, -1)) for process in self._processes]

    def _be_ready(self) -> None:
        """Wakes what sleeps. Raises RunError where there are no weights to wake."""
        self._require_whole()
        if self._empty:
            raise RunError(
                "vLLM has dropped its weights to make room for the learner: publish weights before "
                "anything is sampled or scored"
            )
        if self._asleep:
            with self._changing():
                for part in PARTS:
                    self._wake(part)

    def _require_whole(self) -> None:
        if self._failed:
            raise RunError("vLLM has been ended: see the error before this one")

    def _wake(self, part: str) -> None:
        """Wakes a part, if it sleeps. Raises RunError where an engine sleeps after the last one."""
        if part not in self._asleep:
            return
        asleep = self._call("wake", part=part)
        self._asleep = tuple(other for other in self._asleep if other != part)
        if not self._asleep and any(asleep):
            raise RunError(f"vLLM engine {asleep.index(True)} still sleeps after it was woken")

    @contextmanager
    def _changing(self) -> Iterator[None]:
        """A change that all processes make, or else all end: after a failure nobody knows which
        memory each of them has, and an end gives back all of it.
        """
        self._require_whole()
        try:
            yield
        except BaseException:
            self._failed = True
            self.close()
            raise

    def _call(self, action: str, **arguments: Any) -> list[Any]:
        """Call `action` in all processes at once. Returns the value of each."""
        return self._each(action, [arguments]).result()

    def _each(self, action: str, arguments: Sequence[Mapping[str, Any]]) -> Called:
        """Call `action` in all processes at once, with arguments of each, or the same for all."""
        self._calls += 1
        number = self._calls
        every = list(arguments) * (len(self._processes) if len(arguments) == 1 else 1)
        for process, of_process in zip(self._processes, every, strict=True):
            process.send({"do": action, "call": number, **of_process})
        places = [(process.number, number) for process in self._processes]

        def collect() -> list[Any]:
            while any(place not in self._values for place in places):
                self._receive()
            return [self._values.pop(place) for place in places]

        return Called(collect)

    def _receive(self) -> None:
        """Handle one message, or check that the processes live where none comes."""
        try:
            arrived = self._inbox.get(timeout=SILENT_SECONDS)
        except Empty:
            for process in self._processes:
                if not process.alive:
                    raise process.died() from None
            return
        process, message = self._processes[arrived.number], arrived.message
        if message is None:
            raise process.died()
        if "failed" in message:
            raise process.error(f"failed: {message['failed']}")
        if "ready" in message:
            self._values[(process.number, -1)] = message["ready"]
        elif "done" in message:
            self._values[(process.number, message["done"])] = message["value"]
        else:
            self._done.append(self._completion(SampledTokens(**message)))

    def _completion(self, sampled: SampledTokens) -> Completion:
        request, sample = self._open.pop(sampled.key)
        turn = _turn(request, sampled)
        stopped = sampled.stopped
        if (end := self._end_over_cut(request, turn)) is not None:
            turn, stopped = turn.first(end), True
        if not np.isfinite(turn.logprobs).all():
            raise RunError(
                f"the policy's logits are not finite (version {turn.versions[-1][0]}, ticket "
                f"{request.ticket}, sample {sample}): the weights have diverged; go back to a "
                "checkpoint with a lower learner.lr"
            )
        self.stats.response_tokens += len(sampled.tokens)
        return Completion(
            ticket=request.ticket,
            sample=sample,
            turn=request.turn,
            token_ids=turn.token_ids,
            logprobs=turn.logprobs,
            finish_reason="stop" if stopped else "length",
            versions=turn.versions,
            text=self._model.tokenizer.decode(turn.token_ids.tolist(), skip_special_tokens=True),
        )

    def _end_over_cut(self, request: Request, turn: Written) -> int | None:
        """How many tokens of a turn that was cut there are up to a stop string that began before
        the cut; vLLM looks for it in what it writes itself. None: there is none.
        """
        stops, position = request.sampling.stop, request.position
        if not position or not stops:
            return None
        # A token that shows has at least one byte; a few more, as the first may decode otherwise.
        reach = max(len(stop.encode()) for stop in stops) + MARGIN
        for end in range(position + 1, min(position + reach, len(turn.token_ids)) + 1):
            tail = turn.token_ids[max(0, end - reach) : end].tolist()
            text = self._model.tokenizer.decode(tail, skip_special_tokens=True)
            if any(stop in text for stop in stops):
                return end
        return None

    def _sampling(self, sampling: SamplingSettings, new_tokens: int) -> dict[str, Any]:
        """Sampling settings as keyword arguments of vLLM's SamplingParams."""
        return {
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "min_p": sampling.min_p,
            "stop": list(sampling.stop),
            "max_tokens": new_tokens,
            "stop_token_ids": list(self._model.eos),
        }


def _seed(request: Request, sample: int) -> int:
    counters = (request.ticket, sample, request.turn)
    going_on = (request.position,) if request.position else ()
    return integer(request.seed, "vllm", *counters, *going_on)


def _turn(request: Request, sampled: SampledTokens) -> Written:
    """The turn of a sample from its start."""
    return request.turn_with(
        np.array(sampled.tokens, np.int32),
        np.array(sampled.logprobs, np.float32),
        [(version, tokens) for version, tokens in sampled.versions],
    )
