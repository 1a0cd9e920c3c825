"""The built-in engine.

Each step of `completed`: waiting samples take the free rows (their prompts computed ahead, packed),
every row computes its next token's logits, tokens are drawn (step.py), ended rows leave and the
last rows close the gaps. Which samples share a batch (order, refills, row numbers) is a function of
tickets, samples, turns and token counts, never of the clock or of earlier calls.

On CUDA the tokens of a step are read when the next one has been launched, so that the device never
waits for the host: a row that has ended computes one more token, which is thrown away.
"""

import heapq
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from postgrad.core.errors import RunError, UsageError
from postgrad.core.records import PlacedImage
from postgrad.models.attention import require_embedded, text_config, to_device
from postgrad.models.decoder import decoder_of
from postgrad.models.images import ImageTower
from postgrad.models.routers import replayable
from postgrad.models.supported import is_tested
from postgrad.parallel.device import empty_cache
from postgrad.rollout.engine import Completion, Request, Sent, WeightIntake, in_order
from postgrad.rollout.grammar import Grammars
from postgrad.rollout.local.budget import (
    KEPT_AS_ONE,
    PREFILL_TOKENS,
    SharedPrompts,
    align,
)
from postgrad.rollout.local.cache import KeyValueCache
from postgrad.rollout.local.kept import KeptPrefixes
from postgrad.rollout.local.prompts import (
    Prefilled,
    layer_shapes,
    prefill,
    require_same_samples,
    scored,
    without_images,
)
from postgrad.rollout.local.rows import (
    Flight,
    Rows,
    Stopper,
    completions,
    eos_token_ids,
    require_finite,
)
from postgrad.rollout.local.step import Stepper
from postgrad.rollout.stats import EngineStats

AHEAD = {"cpu": 0, "cuda": 1}  # steps that are launched before the tokens of one are read


class LocalEngine:
    """Samples from a transformers model that was loaded with our attention.

    Weights are version 0 until others are loaded.
    """

    streams = 1

    def __init__(
        self,
        lm: nn.Module,
        tokenizer: Any,
        *,
        slots: int,
        cache_tokens: int,
        borrows: bool = False,
        shares: bool = False,
        records_experts: bool = False,
        tower: ImageTower | None = None,
    ) -> None:
        """lm: the engine's own copy. slots: sequences decoded together in a cache of `cache_tokens`
        places; fewer where sequences are longer than cache_tokens / slots. borrows: loaded weights
        are not copied where that is possible (WeightIntake): whoever changes them in place has to
        load them again before the next request. shares: all weights of `lm` are the learner's
        (models.four_bits.twin), so that none of those to be loaded are read. records_experts:
        completions say which experts tokens were sent to. tower: of a model that reads images.
        Raises UsageError where `lm` has no experts to record.
        """
        self.stats = EngineStats()
        self._lm = lm.eval() if shares else lm.eval().requires_grad_(False)
        self._shares = shares
        self._decoder, self._tower = decoder_of(lm), tower
        self._routers = replayable(lm) if records_experts else None
        self._tokenizer, self._slots, self._borrows = tokenizer, slots, borrows
        parameter = next(lm.parameters())
        self._device = parameter.device
        self._prefill_tokens = PREFILL_TOKENS[self._device.type]
        shapes = layer_shapes(lm, self._device)
        self._cache = KeyValueCache(shapes, cache_tokens, parameter.dtype, self._device)
        self._stopper = Stopper(eos := eos_token_ids(lm, tokenizer), tokenizer)
        self._grammars = Grammars(tokenizer, eos, text_config(lm).vocab_size)
        self._version = self._submitted = 0
        self._waiting: list[tuple[tuple[int, ...], Request]] = []  # a heap
        self._prefilled: Prefilled | None = None
        self._rows = Rows(0, 0)
        self._shared = SharedPrompts(0)
        self._kept = KeptPrefixes(self._cache, self._shared, self._lm)
        self._prompts_computed = 0  # since the engine was idle: names a prompt's stretches
        self._division = (0, 0, 0)  # of the cache: slots, places of a prompt and of a response
        self._stepper = self._new_stepper(0)
        self._flights: list[Flight] = []  # steps whose tokens are not read yet, oldest first
        self._ended: list[Completion] = []  # that `advance` has still to return
        self._ahead = AHEAD[self._device.type]
        self._intake: WeightIntake | None = None  # not None after a publish broke off
        if not is_tested(lm.config):
            require_same_samples(self, lm, self._routers)
            self.stats, self._submitted = EngineStats(), 0

    def submit(self, request: Request) -> None:
        """Queue a request; lower tickets, then lower samples, then earlier turns go first."""
        needed = self._places(request)
        if needed > self._cache.tokens:
            raise UsageError(
                f"ticket {request.ticket}: a prompt of {len(request.prefix)} tokens and "
                f"{request.new_tokens} new ones need {needed} places, the cache has "
                f"{self._cache.tokens}: raise rollout.cache_tokens or lower rollout.max_new_tokens"
            )
        request.require_valid()
        if request.images and self._tower is None:
            raise UsageError(f"ticket {request.ticket} has an image, which this engine cannot read")
        require_embedded(self._lm, without_images(request.token_ids, request.images))
        order = (request.ticket, request.sample_ids[0], request.turn, self._submitted)
        self._submitted += 1
        heapq.heappush(self._waiting, (order, request))

    def completed(
        self, awaited: Collection[int] | None = None, *, halt: Callable[[], bool] = lambda: False
    ) -> list[Completion]:
        """Decode until at least one sample has ended; [] where none is open, and once `halt` is
        true, which is asked before each decode step.
        """
        done: list[Completion] = []
        while not done and (self._rows.count or self._waiting or self._prefilled or self._ended):
            if halt():
                break
            done = self.advance()
        return done

    def notify(self) -> None:
        """Nothing: `completed` waits for nobody."""

    @torch.inference_mode()
    def advance(self) -> list[Completion]:
        """Decode one token for every row. Returns the samples that have ended, as far as tokens are
        read.
        """
        self._require_whole()
        started = time.perf_counter()
        decoding = self._rows.count
        self._admit()
        admitted = time.perf_counter()
        if self._rows.count:
            self._step(decoding)
        # Where a grammar is followed, what may come next depends on the token before it.
        while len(self._flights) > (0 if self._rows.masked else self._ahead):
            self._read()
        done, self._ended = self._ended, []
        self.stats.count_step(started, admitted, time.perf_counter(), turns=len(done))
        return done

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> Sent:
        """Replace all weights. Prompts computed ahead are computed again, rows in progress stay."""
        started, intake = time.perf_counter(), self.begin_weights()
        if not self._shares:
            intake.take(weights)
        self.finish_weights(version)
        return Sent("local", intake.size, time.perf_counter() - started)

    def begin_weights(self) -> WeightIntake:
        """No weights to work with until `finish_weights`. Returns what takes new ones."""
        while self._flights:
            self._read()
        self._intake = WeightIntake(self._lm, borrow=self._borrows)
        return self._intake

    def finish_weights(self, version: int) -> None:
        """The engine works with what was taken. Raises RunError where weights are missing."""
        assert self._intake is not None  # since it began
        if not self._shares:
            self._intake.require_all()
        self._intake = None
        self._decoder.forget()
        self._stepper.reload()
        self._rows.end_version(self._version)
        self._version = version
        self._kept.clear()
        if self._prefilled is not None:
            waiting, self._prefilled = self._prefilled.waiting(), None
            for request in waiting:
                self.submit(request)

    def cut(self) -> list[Request]:
        """Engine.cut: all rows are free afterwards, and the cache is laid out anew for what comes
        next, so that a sample's keys and values are computed again.
        """
        while self._flights:
            self._read()
        rows = self._rows
        requests = [
            rows.requests[row].cut_after(int(rows.sample[row]), rows.whole_turn(row, self._version))
            for row in range(rows.count)
        ]
        requests += self._prefilled.waiting() if self._prefilled is not None else []
        requests += [request for _, request in self._waiting]
        self._rows, self._prefilled, self._waiting = Rows(0, 0), None, []
        self._kept.clear()
        return in_order(requests)

    @torch.inference_mode()
    def logprobs(
        self,
        sequences: Sequence[NDArray[np.int32]],
        temperature: float,
        images: Sequence[tuple[PlacedImage, ...]] = (),
    ) -> list[NDArray[np.float32]]:
        """[T] nats for each sequence, 0 for its first token, by packed forwards of the weights."""
        self._require_whole()
        if self._device.type == "cuda":  # what computing prompts left has no room for logits
            empty_cache(self._device)
        parts = self._lm, self._decoder, self._tower
        return scored(*parts, sequences, images, temperature, self._prefill_tokens)

    def sleep(self) -> None:
        """Free the cache and the decoder's packed weights, unless samples are in progress."""
        if not (self._rows.count or self._waiting or self._prefilled):
            self._decoder.forget()
            self._kept.clear()
            self._cache.release()
            self._division = (0, 0, 0)
            self._stepper = self._new_stepper(0)
            if self._device.type == "cuda":
                empty_cache(self._device)

    def _new_stepper(self, slots: int) -> Stepper:
        return Stepper(self._decoder, self._cache, slots, self._routers)

    def _require_whole(self) -> None:
        if self._intake is not None:
            raise RunError("a publish to the rollout engine broke off: publish its weights again")

    def _places(self, request: Request) -> int:
        # The last token is never computed, but a place for it keeps the arithmetic plain.
        return align(len(request.prefix)) + align(request.new_tokens)

    def _admit(self) -> None:
        """Give free rows to waiting samples."""
        begins = not self._rows.count and self._waiting and self._prefilled is None
        if begins and not self._goes_on():
            self._divide()
        while self._rows.count < self._rows.capacity:
            if self._prefilled is None:
                if not (requests := self._next_prompts()):
                    break
                self._prefilled = prefill(
                    self._decoder, requests, self._device, self._kept, self._routers, self._tower
                )
                self.stats.prompt_tokens += int(self._prefilled.starts[-1])
                self._prompts_computed += len(self._prefilled.hidden)
            pool = self._prefilled
            self._start(pool, pool.take(self._rows.capacity - self._rows.count))
            if pool.empty:
                self._prefilled = None

    def _start(self, pool: Prefilled, taken: list[tuple[int, tuple[int, ...]]]) -> None:
        """Make rows for samples of `pool`'s requests: `taken` as Prefilled.take gives it."""
        first_row = self._rows.count
        lengths = np.diff(pool.starts) + pool.behind
        first_name = self._prompts_computed - len(pool.hidden)
        opened: list[tuple[int, int]] = []
        prompts: list[int] = []
        for number, samples in taken:
            prompt = int(pool.prompt_of[number])
            name, length = first_name + prompt, int(lengths[prompt])
            stretches, new = self._shared.join(name, length, len(samples))
            self._kept.open(new, pool.kept[prompt])
            experts = None if pool.experts is None else pool.experts[prompt]
            self._rows.add(pool.requests[number], samples, stretches, experts, self._grammars)
            opened += [(stretch, prompt) for stretch in new]
            prompts += [prompt] * len(samples)
        if opened:
            numbers, filled = np.array(opened, np.int64).T
            pool.copy_to(self._cache.prompts, numbers, filled)
        of_rows = to_device(np.array(prompts), self._device)
        self._kept.begin_rows(range(first_row, self._rows.count))
        self._cache.states.enter(first_row, pool.states, of_rows)
        self._stepper.enter(first_row, pool.hidden.index_select(0, of_rows))

    def _divide(self) -> None:
        """Lay the empty cache out again, as a function of the waiting requests alone.

        Every slot has room for the longest prompt and the most new tokens that are waiting, as far
        as one slot can have both, and prompts for what is left of its even share of the places.
        """
        tokens, prompt, new = self._cache.tokens, 0, 0
        for _, request in sorted(self._waiting):
            longer = max(prompt, align(len(request.prefix)))
            more = max(new, align(request.new_tokens))
            if prompt and longer + more > tokens:
                break
            prompt, new = longer, more
        prompt = max(prompt, tokens // self._slots // align(1) * align(1) - new)
        slots = min(self._slots, tokens // (prompt + new))
        self._cache.divide(slots, prompt, new)
        self._rows = Rows(slots, new)
        self._shared = SharedPrompts(slots)
        self._kept = KeptPrefixes(self._cache, self._shared, self._lm)
        if self._division == (slots, prompt, new):
            self._stepper.restart()
        else:
            self._division = slots, prompt, new
            self._stepper = self._new_stepper(slots)
        self._prompts_computed = 0

    def _next_prompts(self) -> list[Request]:
        """The next requests whose prompts are computed together.

        One that does not fit the places of a row holds up those behind it until the rows are empty
        and the cache is laid out anew.
        """
        requests: list[Request] = []
        room, rows = self._prefill_tokens, self._rows.capacity - self._rows.count
        takes_over = False
        while self._waiting:
            request = self._waiting[0][1]
            kept = self._kept.reach(request)
            room -= len(request.prefix) - kept + kept // KEPT_AS_ONE
            rows -= len(request.sample_ids)
            takes_over |= kept > 0  # then all rows of the batch begin at once
            full = room < 0 or (takes_over and rows < 0)
            if not self._fits(request) or (requests and full):
                break
            requests.append(heapq.heappop(self._waiting)[1])
        return requests

    def _fits(self, request: Request) -> bool:
        """Whether a request has room in the places of a row."""
        prompts, responses = self._cache.prompts.places, self._cache.responses.places
        return len(request.prefix) <= prompts and request.new_tokens <= responses

    def _goes_on(self) -> bool:
        """Whether the cache keeps its layout: samples go on behind what is kept, and all fit. A
        first turn makes an idle engine forget (fleet/members.py counts on that).
        """
        requests = [request for _, request in self._waiting]
        fit = all(request.turn and self._fits(request) for request in requests)
        return fit and any(map(self._kept.reach, requests))

    def _step(self, decoding: int) -> None:
        """Start computing a token for every row; the first `decoding` rows continue from one."""
        self._flights.append(self._stepper.launch(self._rows, self._shared, decoding))
        self.stats.decode_steps += 1
        self.stats.decode_slots += self._rows.capacity

    @torch.inference_mode()  # states of rows, which may move, were made in it
    def _read(self) -> None:
        """Add the tokens of the oldest step that is not read yet, and free the rows that end."""
        rows = self._rows
        drawn = self._flights.pop(0).read()
        if not np.isfinite(drawn.logprobs).all():  # `cut` has nothing to read after the error
            self._flights, self._cache.diverged = [], True
        require_finite(rows, drawn, self._version)
        rows.append(drawn)
        self.stats.response_tokens += len(drawn.rows)
        self._release(drawn.rows)

    def _release(self, here: NDArray[np.int64]) -> None:
        """Free the rows that have ended, among those with a token. here: those with a new one."""
        rows = self._rows
        n = rows.count
        stopped = self._stopper.stopped(rows)
        ends = (stopped | (rows.written[:n] >= rows.limit[:n])) & (rows.written[:n] > 0)
        dead = rows.follow_grammars(here, ends, self._grammars)
        gone = np.flatnonzero(ends | dead)
        if not len(gone):
            return
        self._ended += completions(rows, gone, stopped, dead, self._version, self._tokenizer)
        self._kept.keep(rows, gone)
        to, source = rows.remove(gone)
        self._cache.responses.move(to, source, rows.launched)
        self._kept.close_gaps(to, source)
        self._stepper.move(to, source)
        for flight in self._flights:
            flight.move(gone, to, source)
        self._kept.rearrange(*self._shared.keep(rows.stretch[: rows.count]))
        if not rows.count:
            self._flights.clear()
