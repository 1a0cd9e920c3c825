"""A rollout engine over one or several vLLM processes.

All samples of a ticket go to one process, so that their prompt is computed once. The tokens drawn
depend on a seed made from (seed, ticket, sample, turn), on the weights and on the prefix, and, up
to rounding, not on the rest of the batch.
"""

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from queue import Empty, SimpleQueue
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from postgrad.core.errors import RunError, UsageError
from postgrad.core.records import PlacedImage
from postgrad.models.attention import text_config
from postgrad.rollout.engine import Completion, Request, Sent, in_order
from postgrad.rollout.grammar import Grammars
from postgrad.rollout.stats import DividedStats, EngineStats, agreed
from postgrad.rollout.transport.broadcast import Meeting
from postgrad.rollout.transport.route import Place, Stated
from postgrad.rollout.transport.send import LocalSource, send
from postgrad.rollout.vllm.model import SampledModel, seed_of
from postgrad.rollout.vllm.process import STILL_SECONDS, Arrived, Stillness, VLLMProcess
from postgrad.rollout.vllm.protocol import SampledTokens
from postgrad.rollout.vllm.weights import Called, Seats, WeightNames, write_adapter

SILENT_SECONDS = 1.0  # without a message, after which the processes are checked
PARTS = ("weights", "kv_cache")  # vLLM's names of what sleeps, in the order in which it wakes


class VLLMEngine:
    """The Engine protocol over vLLM processes, whose messages arrive in one inbox.

    On a learner's devices it sleeps between two publishes: `sleep` frees weights and cache,
    `load_weights` takes the memory of the weights, loads them, and then takes that of the cache.
    Whatever fails on this way ends all processes, so that none is left asleep or half awake.
    """

    streams = 0

    def __init__(
        self,
        processes: Sequence[VLLMProcess],
        inbox: "SimpleQueue[Arrived]",
        model: SampledModel,
        *,
        level: int = 0,
        learner: torch.device | str = "cpu",
        transport: Stated = "auto",
    ) -> None:
        """level: of vLLM's sleep. 0: the engine stays awake; 1: weights are kept in
        host memory; 2: they are dropped, and have to be loaded before anything is computed.
        learner: the device that this process's weights come from; transport: the way they go.
        """
        self._sums = DividedStats(len(processes))
        self.stats: EngineStats = self._sums
        self._processes = processes
        self._inbox = inbox
        self._model = model
        vocabulary = text_config(model.skeleton).vocab_size
        self._grammars = Grammars(model.tokenizer, model.eos, vocabulary)
        self._level = level
        self._asleep: tuple[str, ...] = ()  # the parts that sleep, of PARTS
        self._empty = False  # the weights were dropped and not loaded yet
        self._failed = False  # a change between sleep and work has failed
        self._ending = ExitStack()
        self._every = 1  # ticket of those that come here
        # by key: the request, its sample, and the process that has it
        self._open: dict[int, tuple[Request, int, int]] = {}
        self._keys = 0
        self._calls = 0
        self._values: dict[tuple[int, int], Any] = {}  # of calls, by process and number
        # for `completed` to return
        self._arrived: list[tuple[Request, int, int, SampledTokens]] = []
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
        if request.position and request.grammar:
            raise UsageError(
                f"ticket {request.ticket}: vLLM begins a grammar anew where a sample goes "
                "on; sample with rollout.max_staleness = 0"
            )
        self._be_ready()
        keys = range(self._keys, self._keys + len(request.sample_ids))
        self._keys = keys.stop
        number = request.ticket // self._every % len(self._processes)
        self._open |= {
            key: (request, sample, number)
            for key, sample in zip(keys, request.sample_ids, strict=True)
        }
        self._sums.begin(number, len(keys), prompt)
        self._processes[number].send(
            {
                "do": "sample",
                "keys": list(keys),
                "seeds": [seed_of(request, sample) for sample in request.sample_ids],
                "prompt": request.prefix.tolist(),
                "sampling": self._model.sampling(request),
                **self._model.shown(self._processes[number].folder, [request.images]),
            }
        )

    def completed(
        self, awaited: Collection[int] | None = None, *, halt: Callable[[], bool] = lambda: False
    ) -> list[Completion]:
        """Wait for at least one completion, or until `halt` is true, then take all that have
        arrived. Raises RunError where the logprobs of one are not finite.
        """
        started = time.perf_counter()
        while self._open and not self._arrived and not halt():
            self._receive()
        self.stats.decode_seconds += time.perf_counter() - started
        while not self._inbox.empty():
            self._receive()
        arrived, self._arrived = self._arrived, []
        for _, _, number, sampled in arrived:
            self._sums.end(number, len(sampled.tokens))
        return [
            self._model.completion(request, n, sampled, self._grammars)
            for request, n, _, sampled in arrived
        ]

    def notify(self) -> None:
        """HaltingEngine.notify, by a message of this side."""
        self._inbox.put(Arrived(0, {"notified": True}))

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> Sent:
        """Replace all weights, or the adapter; keys and values of samples in flight are computed
        again. An engine that sleeps is awake afterwards.
        """
        if self.takes_adapter:
            return self.load_adapter({name: t.detach().cpu() for name, t in weights}, version)
        with self._changing():
            route, carrier = self._seats.way()
            return send(LocalSource(weights, self._model.dtype, carrier), self, version, route)

    @property
    def takes_adapter(self) -> bool:
        """Whether vLLM applies an adapter to the base that it read at its start."""
        return self._model.adapter is not None

    def load_adapter(self, tensors: Mapping[str, Tensor], version: int) -> Sent:
        """Replace the adapter, by PEFT's names, in all processes."""
        started, lora = time.perf_counter(), self._model.adapter
        assert lora is not None  # of an engine that takes adapters
        with self._changing():
            for part in PARTS:
                self._wake(part)
            calls = [write_adapter(p.folder, version, tensors, lora) for p in self._processes]
            self._each("load_adapter", calls).result()
        size = sum(tensor.nbytes for tensor in tensors.values())
        return Sent("file", size, time.perf_counter() - started)

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

    def places(self) -> list[Place]:
        """Where the processes are that compute, in the order of their seats in a group."""
        return self._seats.places()

    def meet(self, meeting: Meeting, first: int) -> None:
        """The processes that compute join a group, as members `first` and following."""
        with self._changing():
            self._seats.meet(meeting, first).result()

    def logprobs(
        self,
        sequences: Sequence[NDArray[np.int32]],
        temperature: float,
        images: Sequence[tuple[PlacedImage, ...]] = (),
    ) -> list[NDArray[np.float32]]:
        """[T] nats for each sequence. Every process computes them; raises RunError where one does
        not agree with the first. Samples in flight are cut and go on afterwards: vLLM divides the
        logits of all of a step's rows by one temperature.
        """
        self._be_ready()
        in_flight = self.cut()
        token_lists = [np.asarray(sequence).tolist() for sequence in sequences]
        asked = {"sequences": token_lists, "temperature": temperature}
        calls = [asked | self._model.shown(p.folder, images) for p in self._processes]
        logprobs = [
            [np.array(row, np.float32) for row in value]
            for value in self._each("score", calls).result()
        ]
        for request in in_flight:
            self.submit(request)
        return agreed(logprobs, str(self._model.dtype).removeprefix("torch."), "vLLM engine")

    def cut(self) -> list[Request]:
        """Engine.cut. Samples that go on draw from another seed, made from their position too.
        Raises RunError where the logprobs of one are not finite.
        """
        if not self._open:
            return []
        written = [SampledTokens(**fields) for cut in self._call("cut") for fields in cut]
        stopped = [(*self._open.pop(sampled.key), sampled) for sampled in written]
        requests: list[Request] = []
        for request, sample, number, sampled in stopped:
            turn = self._model.turn(request, sample, sampled)
            if self._model.end_over_cut(request, turn) is None:
                self._sums.cut(number)
                requests.append(request.cut_after(sample, turn))
            else:  # it has ended at a stop string that the cut before has hidden from vLLM
                self._arrived.append((request, sample, number, sampled))
        return in_order(requests)

    @property
    def busy(self) -> bool:
        """Whether samples are in flight."""
        return bool(self._open)

    def sleep(self) -> None:
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
        if "notified" in message:
            return
        if "ready" in message:
            self._values[(process.number, -1)] = message["ready"]
        elif "done" in message:
            self._values[(process.number, message["done"])] = message["value"]
        else:
            sampled = SampledTokens(**message)
            self._arrived.append((*self._open.pop(sampled.key), sampled))

    def deal_every(self, tickets: int) -> None:
        """From now on only every so many tickets come here, as others go to other engines: those
        that come are dealt to the processes in turn.
        """
        self._every = tickets
