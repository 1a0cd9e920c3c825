"""The key-value cache, prompts that several rows share and one response for each row; and attention
over it (`Decoding`; paged.py has kernels for GPUs).

The samples of a prompt share one *stretch*, a run of token places: its keys are read once a step
for all of them (Hydragen, arXiv:2402.05099). Decoding is bound by how many bytes of keys and values
it reads, and most of them are the prompts'; docs/rollout.md has the numbers.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

# Not -inf: a window may hide all of a prompt, and then its share has to be 0, not NaN.
HIDDEN = -1e30


@dataclass(frozen=True, slots=True)
class LayerShape:
    """What one layer stores for each token."""

    heads: int  # key heads
    key_dim: int  # values of a key, per head
    value_dim: int  # values of a value vector, per head
    latent: bool = False  # values are the beginnings of keys (models/latent.py), and stored as such

    @property
    def numbers(self) -> int:
        """Numbers that a token takes."""
        return self.heads * (self.key_dim + (0 if self.latent else self.value_dim))


def bytes_per_token(shapes: tuple[LayerShape, ...], dtype: torch.dtype) -> int:
    """Bytes of one token's keys and values over all layers."""
    return sum(shape.numbers for shape in shapes) * dtype.itemsize


@dataclass(frozen=True, slots=True)
class Stretches:
    """Stretches of one kind, prompts or responses: views of the cache's allocation."""

    keys: tuple[Tensor, ...]  # for each layer [slots, KV, places, D]
    values: tuple[Tensor, ...]  # for each layer [slots, KV, places, Dv]
    places: int  # token places of each stretch
    place: NDArray[np.int64]  # [slots] where in the tensors the stretch of each number is

    @property
    def stores(self) -> list[Tensor]:
        """Keys and values, where these are no part of those."""
        pairs = zip(self.keys, self.values, strict=True)
        apart = [value for key, value in pairs if value.data_ptr() != key.data_ptr()]
        return [*self.keys, *apart]

    def move(
        self, to: NDArray[np.int64], source: NDArray[np.int64], lengths: NDArray[np.int64]
    ) -> None:
        """The stretches `source` get the numbers `to`, which do not overlap. lengths: tokens of
        every stretch, indexed by the new numbers.

        On a CPU, where products read stretches that lie side by side, they are copied. On CUDA
        attention looks up where each is.
        """
        if not len(to) or not self.keys:
            return
        if self.keys[0].device.type != "cpu":
            self.place[to], self.place[source] = self.place[source], self.place[to]
            return
        tokens = int(lengths[to].max())
        onto, of = (torch.from_numpy(a).to(self.keys[0].device) for a in (to, source))
        for store in self.stores:
            store[onto, :, :tokens] = store[of, :, :tokens]

    def exchange(self, first: NDArray[np.int64], second: NDArray[np.int64], tokens: int) -> None:
        """The stretches `first` and `second` change their numbers. tokens: the most of one."""
        to, source = np.concatenate([first, second]), np.concatenate([second, first])
        if self.keys and self.keys[0].device.type != "cpu":
            self.place[to] = self.place[source]
            return
        onto, of = torch.from_numpy(to), torch.from_numpy(source)
        for store in self.stores:
            store[onto, :, :tokens] = store[of, :, :tokens]


class RowStates:
    """The states of the token mixers that carry one (models/states.py), of `slots` rows: for each
    mixer [slots, ...] by name. Of other models it stays empty.
    """

    def __init__(self, slots: int) -> None:
        self._slots = slots
        self._mixers: list[dict[str, Tensor]] = []

    def enter(self, first: int, states: list[dict[str, Tensor]], prompts: Tensor) -> None:
        """New rows from number `first` on: each begins with the state behind its prompt, one of the
        P whose `states` [P, ...] are given for each mixer.
        """
        if not self._mixers:  # a dtype and a shape are known from the first prompt on
            self._mixers = [
                {name: state.new_zeros(self._slots, *state.shape[1:]) for name, state in of.items()}
                for of in states
            ]
        for stored, of in zip(self._mixers, states, strict=True):
            for name, state in of.items():
                stored[name][first : first + len(prompts)] = state.index_select(0, prompts)

    def move(self, to: NDArray[np.int64], source: NDArray[np.int64]) -> None:
        """Row source[i] is number to[i] now."""
        for stored in self._mixers if len(to) else ():
            for state in stored.values():
                onto, of = (torch.from_numpy(rows).to(state.device) for rows in (to, source))
                state[onto] = state[of]

    def exchange(self, first: NDArray[np.int64], second: NDArray[np.int64]) -> None:
        """Rows `first` and `second` change their numbers."""
        self.move(np.concatenate([first, second]), np.concatenate([second, first]))

    def copies(self, rows: NDArray[np.int64]) -> list[dict[str, Tensor]]:
        """The states of some rows, for each mixer [rows, ...] by name."""
        chosen = torch.from_numpy(rows)
        if self._mixers:
            chosen = chosen.to(next(iter(self._mixers[0].values())).device)
        return [
            {name: state.index_select(0, chosen) for name, state in stored.items()}
            for stored in self._mixers
        ]

    def of(self, mixer: int) -> dict[str, Tensor]:
        """The states [slots, ...] of a mixer."""
        return self._mixers[mixer]


class KeyValueCache:
    """One allocation of `tokens` places a layer, divided into `prompts` and `responses`.

    Every place holds a finite number at all times: attention reads all stretches up to the longest,
    and masks the rest of shorter ones after it has read it.
    """

    def __init__(
        self,
        shapes: tuple[LayerShape, ...],
        tokens: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.tokens = tokens
        self._shapes = shapes
        self._dtype = dtype
        self.device = device
        self.release()

    def release(self) -> None:
        """Free the allocation; `divide` makes it again."""
        self._keys: list[Tensor] = []
        self._values: list[Tensor] = []
        self.prompts = self.responses = Stretches((), (), 0, np.arange(0))
        self._scratch: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
        self.states = RowStates(0)
        self.diverged = False  # keys and values may be NaN, until it is divided anew

    def divide(self, slots: int, prompt: int, response: int) -> None:
        """Lay the allocation out for `slots` rows; its content is lost.

        prompt, response: places of each stretch. There are as many prompts as rows, since each row
        may have one of its own; where rows share, the pages of unused ones are never touched.
        Raises ValueError where the rows need more places than there are.
        """
        if slots * (prompt + response) > self.tokens:
            raise ValueError(
                f"{slots} slots of {prompt} + {response} places do not fit into {self.tokens}"
            )
        if not self._keys:
            self._keys = [self._places(shape.heads * shape.key_dim) for shape in self._shapes]
            self._values = [
                keys if shape.latent else self._places(shape.heads * shape.value_dim)
                for keys, shape in zip(self._keys, self._shapes, strict=True)
            ]
        if self.diverged:
            for store in (*self._keys, *self._values):
                store.zero_()
            self.diverged = False
        self.prompts = self._stretches(0, slots, prompt)
        self.responses = self._stretches(slots * prompt, slots, response)
        self.states = RowStates(slots)

    def scratch(self, count: int, dim: int) -> tuple[Tensor, Tensor]:
        """Float32 [count, dim] and [count] for what a kernel leaves for the next one, the same each
        time: CUDA graphs have their addresses. They are zeros at first.
        """
        if (count, dim) not in self._scratch:
            wide = torch.zeros(count, dim, device=self.device)
            self._scratch[count, dim] = wide, torch.zeros(count, device=self.device)
        return self._scratch[count, dim]

    def _places(self, values: int) -> Tensor:
        """Zeros for all places, flat, `values` a token. On a CPU the array begins on a cache line,
        and takes a page of memory when it is first written.
        """
        count = self.tokens * values
        if self.device.type != "cpu":
            return torch.zeros(count, dtype=self._dtype, device=self.device)
        spare, size = 64, count * self._dtype.itemsize
        raw = torch.from_numpy(np.zeros(size + spare, np.uint8))
        start = -raw.data_ptr() % spare
        return raw[start : start + size].view(self._dtype)

    def _stretches(self, first: int, slots: int, places: int) -> Stretches:
        """Views of `slots` stretches, from place `first` of the allocation on."""

        def view(flat: Tensor, heads: int, dim: int) -> Tensor:
            start, size = first * heads * dim, slots * places * heads * dim
            return flat[start : start + size].view(slots, heads, places, dim)

        def values(flat: Tensor, s: LayerShape) -> Tensor:
            if s.latent:
                return view(flat, s.heads, s.key_dim)[..., : s.value_dim]
            return view(flat, s.heads, s.value_dim)

        return Stretches(
            tuple(
                view(flat, s.heads, s.key_dim)
                for flat, s in zip(self._keys, self._shapes, strict=True)
            ),
            tuple(map(values, self._values, self._shapes)),
            places,
            np.arange(slots),
        )


class Decoding:
    """One new token for each of the first N rows of the cache, over its prompt and its response.
    Idle rows are among them: each sees its own token, and nothing reads its result.

    Grouped queries are extra query rows of their key head, and so are the rows that share a prompt:
    each key is read once for all of them. Prompt and response have a softmax each; the two are
    merged by their sums. Rows and heads are one batch of matrix products: with few queries a row
    that is up to twice as fast as scaled_dot_product_attention on CPUs.
    """

    def __init__(
        self,
        cache: KeyValueCache,
        *,
        places: Tensor,
        lengths: Tensor,
        row_of_lane: Tensor,
        lane_of_row: Tensor,
        width: int,
        prompt_places: int,
        response_places: int,
    ) -> None:
        """places: [N] index of the new token in its row's response. The others as in PromptLanes;
        those of idle rows are not read. prompt_places, response_places: how many are attended to.
        """
        self._cache = cache
        self._width = width
        self._prompt_places, self._response_places = prompt_places, response_places
        self._places, self._lengths = places, lengths
        self._rows, self._lanes = row_of_lane, lane_of_row
        self._index: dict[int, tuple[Tensor, Tensor, Tensor]] = {}
        self._bias: dict[tuple[int, int, int | None, torch.dtype], tuple[Tensor, Tensor]] = {}

    def _indices(self, heads: int) -> tuple[Tensor, Tensor, Tensor]:
        """Indices for `heads` key heads, each head counted as a row: (new places, rows of lanes,
        lanes of rows).

        New places: [N * heads] into a layer's responses viewed as [slots * heads * places]. Rows of
        lanes: [A * heads * width]. Lanes of rows: [N * heads].
        """
        if heads not in self._index:
            head = torch.arange(heads, device=self._places.device)
            row = torch.arange(len(self._places), device=self._places.device)
            stretch = (row[:, None] * heads + head) * self._cache.responses.places
            rows = self._rows.view(-1, 1, self._width) * heads + head[:, None]
            number, lane = self._lanes // self._width, self._lanes % self._width
            lanes = (number[:, None] * heads + head) * self._width + lane[:, None]
            self._index[heads] = (
                (stretch + self._places[:, None]).flatten(), rows.flatten(), lanes.flatten()
            )  # fmt: skip
        return self._index[heads]

    def _biases(
        self, heads: int, groups: int, window: int | None, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        """The masks that are added to scores over prompts and over responses: 0 where a row may
        attend, HIDDEN elsewhere.

        [A * heads, 1 or width * groups, prompt places] and [N * heads, 1, response places].
        """
        cached = self._bias.get((heads, groups, window, dtype))
        if cached is not None:
            return cached
        prompt_places = torch.arange(self._prompt_places, device=self._places.device)
        response_places = torch.arange(self._response_places, device=self._places.device)
        over_prompts = (prompt_places >= self._lengths[:, None])[:, None]
        over_responses = response_places > self._places[:, None]
        if window is not None:
            over_responses = over_responses | (response_places <= self._places[:, None] - window)
            length = self._lengths[self._lanes // self._width]
            last_hidden = (length + self._places - window)[self._rows].view(-1, self._width, 1)
            over_prompts = over_prompts | (prompt_places <= last_hidden)
            over_prompts = over_prompts.repeat_interleave(groups, 1)
        biases = tuple(
            torch.zeros(hidden.shape, dtype=dtype, device=hidden.device)
            .masked_fill_(hidden, max(HIDDEN, torch.finfo(dtype).min / 2))
            .repeat_interleave(heads, 0)
            for hidden in (over_prompts, over_responses[:, None])
        )
        self._bias[heads, groups, window, dtype] = biases[0], biases[1]
        return biases[0], biases[1]

    def attend(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        scale: float,
        window: int | None,
        softcap: float | None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """query [H, N, D], key [KV, N, D], value [KV, N, Dv]; returns [N, H, Dv]. Stores the new
        keys and values in the cache first.
        """
        heads, rows, dim = query.shape
        kv_heads, value_dim = value.shape[0], value.shape[2]
        groups = heads // kv_heads
        new_places, rows_of_lanes, lanes_of_rows = self._indices(kv_heads)
        prompts, responses = self._cache.prompts, self._cache.responses
        keys, values = responses.keys[layer], responses.values[layer]
        keys.view(-1, dim).index_copy_(0, new_places, key.transpose(0, 1).reshape(-1, dim))
        new_values = value.transpose(0, 1).reshape(-1, value_dim)
        values.view(-1, value_dim).index_copy_(0, new_places, new_values)
        queries = query.transpose(0, 1).reshape(rows * kv_heads, groups * dim)
        in_lanes = queries.index_select(0, rows_of_lanes)
        over_prompts, over_responses = self._biases(kv_heads, groups, window, query.dtype)
        stretches = len(self._lengths)
        from_prompts, prompt_sum = _attend(
            in_lanes.view(stretches * kv_heads, self._width * groups, dim),
            prompts.keys[layer][:stretches, :, : self._prompt_places].flatten(0, 1),
            prompts.values[layer][:stretches, :, : self._prompt_places].flatten(0, 1),
            over_prompts,
            scale,
            softcap,
        )
        from_responses, response_sum = _attend(
            queries.view(rows * kv_heads, groups, dim),
            keys[:rows, :, : self._response_places].flatten(0, 1),
            values[:rows, :, : self._response_places].flatten(0, 1),
            over_responses,
            scale,
            softcap,
        )
        from_prompts = _by_row(from_prompts, lanes_of_rows, from_responses.shape)
        prompt_sum = _by_row(prompt_sum, lanes_of_rows, response_sum.shape)
        share = torch.sigmoid(prompt_sum - response_sum).to(from_responses.dtype)
        out = torch.lerp(from_responses, from_prompts, share).view(rows, heads, value_dim)
        return out if sinks is None else _less_sinks(out, prompt_sum, response_sum, sinks)


def _less_sinks(out: Tensor, prompt_sum: Tensor, response_sum: Tensor, sinks: Tensor) -> Tensor:
    """out: [N, H, Dv], without the part of each softmax that goes to the sinks [H]."""
    log_sum = torch.logaddexp(prompt_sum, response_sum).view(*out.shape[:2], 1)
    return out * torch.sigmoid(log_sum - sinks[:, None]).to(out.dtype)


def _by_row(results: Tensor, lanes_of_rows: Tensor, shape: torch.Size) -> Tensor:
    """[A * heads, width * groups, ...], the results of lanes, as those of rows: `shape`, which is
    [N * heads, groups, ...].
    """
    return results.view(-1, shape[1:].numel()).index_select(0, lanes_of_rows).view(shape)


def _attend(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor, scale: float, softcap: float | None
) -> tuple[Tensor, Tensor]:
    """query: [B, Q, D], key: [B, K, D], value: [B, K, Dv]. Returns [B, Q, Dv], and [B, Q, 1] the
    log of the sum of exp(scores).

    The sum comes from the softmax: its largest weight is exp(largest score) / sum.
    """
    if key.device.type == "cpu" and key.dtype == torch.bfloat16:
        # A part of each stretch is not contiguous, and oneDNN takes nothing else: the product would
        # take three times as long in a plain kernel.
        key = key.contiguous()
    if softcap is None:
        scores = torch.baddbmm(bias, query, key.transpose(1, 2), alpha=scale)
    else:
        scores = torch.bmm(query, key.transpose(1, 2)).mul_(scale / softcap)
        scores = scores.tanh_().mul_(softcap).add_(bias)
    scores = scores.float()  # first of all: amax takes up to ten times as long in bfloat16 on CPUs
    weights = scores.softmax(-1)
    log_sum = scores.amax(-1, keepdim=True) - weights.amax(-1, keepdim=True).log_()
    return torch.bmm(weights.to(value.dtype), value), log_sum
