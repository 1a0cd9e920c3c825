"""One decode step as a function of buffers that stay where they are.

`step` is device work alone: it asks the host for nothing, so it is traced by torch.compile and
captured as a CUDA graph. What the host decides between steps (which rows are in use, what they
read, how they sample) is one block of numbers, uploaded when it has changed. Everything else is in
a `StepShape`: two steps of one shape call the same operations.

`Stepper` runs steps. On CUDA it captures a graph for each shape that comes a second time. A graph
has the addresses of weights, buffers and cache: it serves as long as these stay, also for weights
that were written in place since. Results are copied to the host in the background, and read when
the caller asks for them.
"""

from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from postgrad.models.attention import AttentionContext
from postgrad.models.decoder import Decoder
from postgrad.models.latent import LatentDecoding
from postgrad.models.routers import Routers, chosen_of
from postgrad.rollout.grammar import ALL
from postgrad.rollout.local.budget import LANES, SharedPrompts, align, rows_computed
from postgrad.rollout.local.cache import Decoding, KeyValueCache
from postgrad.rollout.local.rows import Flight, Rows
from postgrad.rollout.local.sampler import Kind, Knobs, mask_bytes, sample, uniform

# Columns of the block, an integer of 64 bits for each row; KNOBS are float64 in the same bits.
COLUMNS = (
    *("source", "written", "active", "fresh", "position", "prompt", "rotary", "key", "lane"),
    *("response", "top_k"),
)  # fmt: skip
KNOBS = ("temperature", "top_p", "min_p")
STRETCHES = ("length", "used", "place")  # of prompts: tokens, lanes in use, place in the cache
NAMED = (*COLUMNS, *KNOBS, *STRETCHES)  # behind them LANES columns without names


@dataclass(frozen=True, slots=True)
class StepShape:
    """What decides which operations a step calls, apart from the sizes of its buffers."""

    decoded: int  # rows that go through the layers; 0: all rows are new
    sampled: int  # rows whose logits are computed
    drawn: int  # rows that get a token
    enters: bool  # there may be rows whose first token is drawn: `entering` has their states
    kind: Kind
    # Of attention in blocks; a kernel that reads the lengths itself has 0 for all of them.
    prompt_places: int = 0  # that are attended to
    response_places: int = 0  # likewise
    stretches: int = 0  # prompts
    width: int = 0  # lanes of each


class StepBuffers:
    """What a step reads and writes, for up to `capacity` rows.

    ids: [capacity] the newest token of each row. results: [2, capacity] int32, the drawn tokens and
    the bits of their float32 logprobs. entering: [capacity, hidden] the states that predict the
    first tokens of new rows, None before there was one.
    """

    def __init__(self, capacity: int, device: torch.device) -> None:
        self.capacity = capacity
        self.block = torch.zeros(len(NAMED) + LANES, capacity, dtype=torch.int64, device=device)
        self.ids = torch.zeros(capacity, dtype=torch.int64, device=device)
        self.results = torch.zeros(2, capacity, dtype=torch.int32, device=device)
        self.entering: Tensor | None = None
        self.experts: Tensor | None = None  # [rows, layers, k] of the newest tokens
        # [capacity, bytes] as `sample` writes it, from the first step on in which a row keeps it
        self.left: Tensor | None = None
        columns = dict(zip(NAMED, self.block, strict=False))
        self.columns = columns
        self.written, self.active = columns["written"], columns["active"]
        self.position = columns["position"]  # in its turn, of the first token of each response
        self.fresh, self.prompt, self.key = columns["fresh"], columns["prompt"], columns["key"]
        self.row_of_lane = self.block[len(NAMED) :].flatten()
        wide = [columns[name].view(torch.float64) for name in KNOBS]
        self.knobs = Knobs(wide[0], columns["top_k"], wide[1], wide[2])

    def allow(self, words: NDArray[np.int32]) -> None:
        """Take the bits [rows, W] of the tokens that the first rows may draw."""
        if self.knobs.allowed is None:
            size = self.capacity, words.shape[1]
            allowed = torch.full(size, ALL, dtype=torch.int32, device=self.block.device)
            self.knobs = replace(self.knobs, allowed=allowed)
        assert self.knobs.allowed is not None
        self.knobs.allowed[: len(words)].copy_(_host(words, self.block.device), non_blocking=True)

    def places(self, rows: int) -> Tensor:
        """[rows] the index of the newest token of each of the first rows in its response, 0 for
        rows without one.
        """
        return (self.written[:rows] - 1).clamp_(min=0)

    def enter(self, first: int, states: Tensor) -> None:
        """Take the states [N, hidden] of new rows, from row number `first` on."""
        if self.entering is None:
            self.entering = states.new_zeros(self.capacity, states.shape[1])
        self.entering[first : first + len(states)].copy_(states)


def _host(array: NDArray[Any], device: torch.device) -> Tensor:
    """`array` for a copy to the device; pinned, so that nothing waits for that."""
    host = torch.from_numpy(array)
    return host if device.type == "cpu" else host.pin_memory()


def step(
    decoder: Decoder,
    cache: KeyValueCache,
    buffers: StepBuffers,
    shape: StepShape,
    routers: Routers | None = None,
) -> None:
    """One token for each of the first rows, into `ids` and `results`; their keys and values into
    the cache. routers: those whose experts go into `experts`.
    """
    hidden: Tensor | None = None
    if shape.decoded:
        rows = shape.decoded
        positions = buffers.columns["rotary"][:rows] + buffers.places(rows)
        context = _attention(cache, buffers, shape)
        if decoder.latents is not None:
            context = LatentDecoding(context, decoder.latents)
        if decoder.stateful:
            from postgrad.models.mixing import TokenMixing
            from postgrad.models.states import StateContext

            goes_on = buffers.active[:rows] > buffers.fresh[:rows]
            context = StateContext(context, TokenMixing(cache.states.of, goes_on))
        with nullcontext() if routers is None else routers.recording() as routed:
            hidden = decoder.hidden_states(buffers.ids[:rows], positions, context)
        buffers.experts = None if routed is None else chosen_of(routed)
    if shape.enters:
        hidden = _entered(hidden, buffers, shape)
    assert hidden is not None  # a step without old rows has new ones
    n = shape.drawn
    numbers = uniform(buffers.key[:n], buffers.position[:n] + buffers.written[:n])
    logits = decoder.logits(hidden)[:n]
    if shape.kind.keeps and buffers.left is None:  # never while a graph is captured
        size = buffers.capacity, mask_bytes(logits.shape[1])
        buffers.left = torch.zeros(size, dtype=torch.uint8, device=logits.device)
    left = None if buffers.left is None else buffers.left[:n]
    tokens, logprobs = sample(logits, buffers.knobs.rows(slice(0, n)), numbers, shape.kind, left)
    buffers.ids[:n].copy_(tokens)
    buffers.results[0, :n].copy_(tokens)
    buffers.results[1, :n].view(torch.float32).copy_(logprobs)
    buffers.written[:n].add_(buffers.active[:n])


def _entered(hidden: Tensor | None, buffers: StepBuffers, shape: StepShape) -> Tensor:
    """The states [sampled, hidden]: of new rows what their prompts gave."""
    assert buffers.entering is not None
    entering = buffers.entering[: shape.sampled]
    if hidden is None:
        return entering
    missing = shape.sampled - shape.decoded
    decoded = functional.pad(hidden, (0, 0, 0, missing)) if missing else hidden
    return torch.where(buffers.fresh[: shape.sampled, None] > 0, entering, decoded)


def _attention(cache: KeyValueCache, buffers: StepBuffers, shape: StepShape) -> AttentionContext:
    columns = buffers.columns
    if buffers.block.device.type != "cpu":
        from postgrad.rollout.local.paged import PagedDecoding  # Triton is there with CUDA alone

        return PagedDecoding(
            cache,
            written=buffers.written,
            prompt=buffers.prompt,
            response=columns["response"],
            length=columns["length"],
            used=columns["used"],
            stretch=columns["place"],
            row_of_lane=buffers.row_of_lane,
            rows=shape.decoded,
        )
    return Decoding(
        cache,
        places=buffers.places(shape.decoded),
        lengths=columns["length"][: shape.stretches],
        row_of_lane=buffers.row_of_lane[: shape.stretches * shape.width],
        lane_of_row=columns["lane"][: shape.decoded],
        width=shape.width,
        prompt_places=shape.prompt_places,
        response_places=shape.response_places,
    )


def _on_its_way(results: Tensor | None) -> Tensor | None:
    """A copy of a device's results to the host, which the device has still to make."""
    if results is None:
        return None
    host = torch.empty(results.shape, dtype=results.dtype, pin_memory=True)
    return host.copy_(results, non_blocking=True)


class Stepper:
    """Runs the steps of up to `capacity` rows."""

    def __init__(
        self,
        decoder: Decoder,
        cache: KeyValueCache,
        capacity: int,
        routers: Routers | None = None,
    ) -> None:
        """routers: those whose experts are recorded."""
        self._decoder = decoder
        self._routers = routers
        self._cache = cache
        self._device = cache.device
        self._captures = cache.device.type == "cuda"
        self._buffers = StepBuffers(capacity, cache.device)
        self._source = np.arange(capacity)  # the row that each row was at the last upload
        self._changed = True
        self._lanes = StepShape(0, 0, 0, False, Kind(False, False, False))  # of attention in blocks
        self._seen: set[StepShape] = set()
        self._graphs: dict[StepShape, torch.cuda.CUDAGraph] = {}
        self._pool: Any = None  # that all graphs share
        self._addresses: tuple[int, ...] = ()  # of the weights that the graphs read
        self._reloaded = False

    def reload(self) -> None:
        """Weights were loaded. The next step drops the graphs if some lie elsewhere now."""
        self._reloaded = True

    def restart(self) -> None:
        """All rows have ended, and others will come; the cache lies where it lay."""
        self._source[:] = np.arange(len(self._source))
        self._changed = True

    def enter(self, first: int, states: Tensor) -> None:
        """New rows from number `first` on, whose first tokens `states` [N, hidden] predict."""
        self._buffers.enter(first, states)
        self._changed = True

    def move(self, to: NDArray[np.int64], source: NDArray[np.int64]) -> None:
        """Row source[i] is number to[i] now; rows have ended."""
        self._source[to] = self._source[source]
        self._changed = True

    def launch(self, rows: Rows, shared: SharedPrompts, decoding: int) -> Flight:
        """Start a step of all rows in use, of which the first `decoding` have a token already."""
        self._decoder.prepare()
        if self._reloaded:
            self._check_graphs()
        count, on_cpu = rows.count, self._device.type == "cpu"
        sampled = rows_computed(count, rows.capacity, self._device.type)
        decoded = rows_computed(decoding, rows.capacity, self._device.type) if decoding else 0
        if self._changed:
            self._upload(rows, shared, decoding)
        # The lanes are of the rows that decode; a row is new for one step.
        self._changed = decoding < count
        shape = StepShape(decoded, sampled, count, decoding < count, rows.kind())
        if shape.kind.masked:
            self._buffers.allow(rows.allowed[:count])
        if not on_cpu:  # few shapes: idle rows get tokens too, and a new row takes part in all
            shape = replace(shape, decoded=sampled, drawn=sampled, enters=True)
        elif decoding:
            places = self._cache.responses.places
            lanes = self._lanes
            shape = replace(
                shape,
                prompt_places=lanes.prompt_places,
                response_places=min(align(int(rows.launched[:decoding].max())), places),
                stretches=lanes.stretches,
                width=lanes.width,
            )
        self._run(shape)
        rows.launched[:count] += 1
        return self._flight(count, keeps=shape.kind.keeps)

    def _check_graphs(self) -> None:
        self._reloaded = False
        if self._graphs and self._addresses != self._decoder.addresses():
            self._seen.clear()
            self._graphs.clear()
            self._pool = None  # torch takes none again whose graphs are all gone

    def _run(self, shape: StepShape) -> None:
        """A step: as it is, or from its shape's second time on as a graph."""
        arguments = self._decoder, self._cache, self._buffers, shape
        if shape not in self._seen or not self._captures or not self._decoder.static:
            self._seen.add(shape)  # the first time compiles kernels, and chooses those of cuBLAS
            self._buffers.experts = None
            step(*arguments, self._routers)
        else:
            if shape not in self._graphs:
                self._addresses = self._decoder.addresses()
                self._graphs[shape] = self._captured(shape)
            self._graphs[shape].replay()

    def _captured(self, shape: StepShape) -> torch.cuda.CUDAGraph:
        """A graph of a step. All graphs share one pool of memory: what a step leaves for the next
        one is in the buffers and the cache, which are older than any of them.
        """
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            step(self._decoder, self._cache, self._buffers, shape)
        return graph

    def _flight(self, count: int, *, keeps: bool) -> Flight:
        """The newest step's results. keeps: sampling masks too."""
        results, experts = self._buffers.results, self._buffers.experts
        left = self._buffers.left[:count] if keeps and self._buffers.left is not None else None
        if self._device.type == "cpu":
            left = None if left is None else left.clone()
            return Flight(np.arange(count), results[:, :count].clone(), None, experts, left)
        host, experts, left = map(_on_its_way, (results, experts, left))
        assert host is not None
        arrived = torch.cuda.Event()
        arrived.record()
        return Flight(np.arange(count), host, arrived, experts, left)

    def _upload(self, rows: Rows, shared: SharedPrompts, decoding: int) -> None:
        """Write the block anew, and put the newest tokens where their rows are now."""
        capacity, count = rows.capacity, rows.count
        block = np.zeros((len(NAMED) + LANES, capacity), np.int64)
        columns = dict(zip(NAMED, block, strict=False))
        columns["source"][:] = self._source
        columns["written"][:count] = rows.launched[:count]
        columns["active"][:count] = 1
        columns["fresh"][decoding:count] = 1
        columns["position"][:count] = rows.position[:count]
        columns["prompt"][:count] = rows.prompt[:count]
        columns["rotary"][:count] = rows.rotary[:count]
        columns["key"][:count] = rows.key[:count].view(np.int64)
        columns["response"][:] = self._cache.responses.place[:capacity]
        columns["top_k"][:count] = rows.top_k[:count]
        for name in KNOBS:
            columns[name].view(np.float64)[:count] = getattr(rows, name)[:count]
        if decoding:
            self._write_lanes(rows, shared, decoding, block)
        self._buffers.block.copy_(_host(block, self._device), non_blocking=True)
        ids = self._buffers.ids
        ids.copy_(ids.index_select(0, self._buffers.columns["source"]))
        self._source[:] = np.arange(capacity)

    def _write_lanes(
        self, rows: Rows, shared: SharedPrompts, decoding: int, block: NDArray[np.int64]
    ) -> None:
        columns = dict(zip(NAMED, block, strict=False))
        width = None if self._device.type == "cpu" else LANES
        lanes = shared.lanes(rows.stretch[:decoding], width)
        stretches = len(lanes.lengths)
        columns["lane"][:decoding] = lanes.lane_of_row
        columns["length"][:stretches] = lanes.lengths
        columns["used"][:stretches] = lanes.used
        columns["place"][:] = self._cache.prompts.place[: rows.capacity]
        block[len(NAMED) :].ravel()[: len(lanes.row_of_lane)] = lanes.row_of_lane
        places = min(align(int(lanes.lengths.max())), self._cache.prompts.places)
        self._lanes = replace(
            self._lanes, prompt_places=places, stretches=stretches, width=lanes.width
        )
