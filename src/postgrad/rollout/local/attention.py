"""The engine's two attention contexts: `Recording` keeps the keys and values of prompts for the
cache, `Decoding` computes one token for each row over it.
"""

import torch
from torch import Tensor

from postgrad.models.attention import AttentionContext
from postgrad.rollout.local.cache import KeyValueCache, LayerShape

# Not -inf: a window may hide all of a prompt, and then its share has to be 0, not NaN.
HIDDEN = -1e30


class Recording:
    """Another context's attention that also keeps keys and values: [KV, T, D] for each layer."""

    def __init__(self, inner: AttentionContext) -> None:
        self._inner = inner
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []

    @property
    def shapes(self) -> tuple[LayerShape, ...]:
        """The shape of what each layer stored for a token."""
        pairs = zip(self.keys, self.values, strict=True)
        return tuple(LayerShape(k.shape[0], k.shape[2], v.shape[2]) for k, v in pairs)

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
    ) -> Tensor:
        """The inner context's attention. It keeps copies: views would hold the whole projection,
        queries included.
        """
        self.keys.append(key.contiguous())
        self.values.append(value.contiguous())
        return self._inner.attend(
            layer, query, key, value, scale=scale, window=window, softcap=softcap
        )


class Decoding:
    """One new token for each of the first N rows of the cache, over its prompt and its response.
    Idle rows are among them: each sees its own token, and nothing reads its result.

    Grouped queries are extra query rows
    of their key head, and so are the rows that share a prompt: each key is read once for all of
    them. Prompt and response have a softmax each; the two are merged by their sums. Rows and heads
    are one batch of matrix products: with few queries a row that is up to twice as fast as
    scaled_dot_product_attention on CPUs.
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
        old: int,
        new: int,
    ) -> None:
        """places: [N] index of the new token in its row's response. The others as in PromptLanes;
        those of idle rows are not read. old, new: how many places of prompts and of responses are
        attended to.
        """
        self._cache = cache
        self._width, self._old, self._new = width, old, new
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
        prompt_places = torch.arange(self._old, device=self._places.device)
        response_places = torch.arange(self._new, device=self._places.device)
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
            .masked_fill_(hidden, HIDDEN)
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
    ) -> Tensor:
        """query [H, N, D], key [KV, N, D], value [KV, N, Dv]; returns [N, H, Dv].

        Stores the new keys and values in the cache first.
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
            prompts.keys[layer][:stretches, :, : self._old].flatten(0, 1),
            prompts.values[layer][:stretches, :, : self._old].flatten(0, 1),
            over_prompts,
            scale,
            softcap,
        )
        from_responses, response_sum = _attend(
            queries.view(rows * kv_heads, groups, dim),
            keys[:rows, :, : self._new].flatten(0, 1),
            values[:rows, :, : self._new].flatten(0, 1),
            over_responses,
            scale,
            softcap,
        )
        from_prompts = _by_row(from_prompts, lanes_of_rows, from_responses.shape)
        prompt_sum = _by_row(prompt_sum, lanes_of_rows, response_sum.shape)
        share = torch.sigmoid(prompt_sum - response_sum).to(from_responses.dtype)
        return torch.lerp(from_responses, from_prompts, share).view(rows, heads, value_dim)


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
