"""Attention of decoding on CUDA: three kernels that read every length on the device, so that one
CUDA graph serves all lengths. A fourth one, `_fill`, copies prompts into the cache.

`_store` writes the new keys and values. `_attend` goes through a stretch of the cache, prompts with
up to 16 rows at a time and responses with one, in several parts, and leaves each part's result
with the log of its sum (Hydragen, arXiv:2402.05099; flash-decoding). `_merge` weighs the parts. The
order of every sum is fixed by the number of rows, never by the lengths of other rows. Where values
are the beginnings of keys (models/latent.py), each place is read once for both.
"""

import math
from collections.abc import Iterable
from typing import Any

import triton  # pyright: ignore[reportMissingImports]  # comes with builds of torch for CUDA
import triton.language as tl  # pyright: ignore[reportMissingImports]
from torch import Tensor

from postgrad.rollout.local.budget import LANES
from postgrad.rollout.local.cache import KeyValueCache, Stretches

PROGRAMS = 512  # that a kernel should have at least: a few for each of a GPU's processors
MOST_PARTS = 16  # of a stretch
FILLED = 32  # places of a prompt that a program copies
QUERIES = 16  # of a latent, whose tiles are wide, in one program
TILE_BYTES = 16384  # of one tile of queries, keys or values: four of them fit every GPU


@triton.jit
def _store(
    key, value, keys, values, written, slots, key_head, key_row, value_head, value_row, places,
    KV: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, VALUES: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
):  # fmt: skip
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    place = tl.maximum(tl.load(written + row) - 1, 0)
    to = (tl.load(slots + row) * KV + head) * places + place
    d, dv = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_DV)
    new = tl.load(key + head * key_head + row * key_row + d, mask=d < D)
    tl.store(keys + to * D + d, new, mask=d < D)
    new = tl.load(value + head * value_head + row * value_row + dv, mask=dv < DV)
    tl.store(values + to * VALUES + dv, new, mask=dv < DV)


@triton.jit
def _vectors(at, places, there, SIZE: tl.constexpr):
    """The vectors of SIZE numbers that begin at `at`, zeros where they are not `there`."""
    mask = there[:, None] & (places < SIZE)[None, :]
    return tl.load(at[:, None] + places[None, :], mask=mask, other=0.0)


@triton.jit
def _fill(
    key, value, keys, values, start, length, slots, behind, tokens, places,
    KV: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, VALUES: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    prompt, head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    place = tl.program_id(2) * BLOCK_N + tl.arange(0, BLOCK_N)
    there = place < tl.load(length + prompt)
    of = head * tokens + tl.load(start + prompt) + place
    to = (tl.load(slots + prompt) * KV + head) * places + tl.load(behind + prompt) + place
    d, dv = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_DV)
    new = _vectors(key + of * D, d, there, D)
    tl.store(keys + to[:, None] * D + d[None, :], new, mask=there[:, None] & (d < D)[None, :])
    new = _vectors(value + of * VALUES, dv, there, DV)
    at = values + to[:, None] * VALUES + dv[None, :]
    tl.store(at, new, mask=there[:, None] & (dv < DV)[None, :])


def fill(
    stretches: Stretches,
    layers: Iterable[tuple[Tensor, Tensor]],
    table: Tensor,
    longest: int,
) -> None:
    """Copies prompts into the cache, with a kernel for each layer: torch sorts the places first, in
    14 kernels, where results have to be deterministic.

    layers: the keys [KV, T, D] and values [KV, T, Dv] of the packed prompts, laid out as in the
    cache: contiguous, or values that are the beginnings of keys. table:
    [4, P] int64, of each prompt where it begins among the T tokens, its tokens, its place in
    `stretches`, and behind how many tokens there; longest: the most tokens of one.
    """
    start, length, slots, behind = table
    for number, (key, value) in enumerate(layers):
        kv_heads, tokens, dim = key.shape
        value_dim = value.shape[2]
        grid = len(slots), kv_heads, triton.cdiv(longest, FILLED)
        _fill[grid](  # pyright: ignore[reportIndexIssue]
            key, value, stretches.keys[number], stretches.values[number], start, length, slots,
            behind, tokens, stretches.places, KV=kv_heads, D=dim, DV=value_dim,
            VALUES=stretches.values[number].stride(2), BLOCK_D=_tile(dim),
            BLOCK_DV=_tile(value_dim), BLOCK_N=FILLED,
        )  # fmt: skip


@triton.jit
def _products(asked, key):
    return tl.dot(asked, tl.trans(key), input_precision="ieee")


@triton.jit
def _scores(products, seen, scale, softcap, SOFTCAP: tl.constexpr):
    """[M, N] float32, -inf where a query does not see a place."""
    scores = products * scale
    if SOFTCAP:
        scores = softcap * (2.0 * tl.sigmoid(2.0 * scores / softcap) - 1.0)
    return tl.where(seen, scores, float("-inf"))


@triton.jit
def _with_block(top, total, sought, scores, value):
    """The largest score, the sum of weights and the weighted values of each query, with one more
    block of places (Milakov and Gimelshein 2018, arXiv:1805.02867).
    """
    higher = tl.maximum(top, tl.max(scores, 1))
    level = tl.where(higher == float("-inf"), 0.0, higher)
    weights = tl.exp(scores - level[:, None])
    kept = tl.exp(top - level)
    added = tl.dot(weights.to(value.dtype), value, input_precision="ieee")
    return higher, total * kept + tl.sum(weights, 1), sought * kept[:, None] + added


@triton.jit
def _finished(top, total, sought):
    """The log of the sum of exp(scores), -inf where a query sees no place, and the mean value."""
    empty = total == 0.0
    log_sum = tl.where(empty, float("-inf"), top + tl.log(tl.where(empty, 1.0, total)))
    return log_sum, sought / tl.where(empty, 1.0, total)[:, None]


@triton.jit
def _query_rows(row_of_lane, used, stretch, block, m, GROUPS, WIDTH, TAKEN, PROMPTS: tl.constexpr):
    """The row of each of the block's queries, and which of them are there."""
    if PROMPTS:
        lane = block * TAKEN + m // GROUPS
        here = (m < TAKEN * GROUPS) & (lane < tl.load(used + stretch))
        row = tl.load(row_of_lane + stretch * WIDTH + lane, mask=here, other=0)
    else:
        here = m < GROUPS
        row = (stretch + m * 0).to(tl.int64)
    return row, here


@triton.jit
def _first_seen(
    written, prompt, row, here, window, WINDOW: tl.constexpr, PROMPTS: tl.constexpr
):  # fmt: skip
    """The first place that each row sees; 0 without a window."""
    first = row * 0
    if WINDOW:
        first = tl.maximum(tl.load(written + row, mask=here, other=0) - 1, 0) - window + 1
        if PROMPTS:
            first += tl.load(prompt + row, mask=here, other=0)
    return first


@triton.jit
def _span(written, lengths, stretch, split, SPLITS, BLOCK_N, PROMPTS: tl.constexpr):
    """The first place of a part of a stretch, and the place behind its last."""
    if PROMPTS:
        length = tl.load(lengths + stretch)
    else:
        length = tl.maximum(tl.load(written + stretch) - 1, 0) + 1
    share = tl.cdiv(tl.cdiv(length, SPLITS), BLOCK_N) * BLOCK_N
    start = split * share
    return start, tl.minimum(start + share, length)


@triton.jit
def _attend(
    query, keys, values, parts, sums, written, prompt, row_of_lane, used, lengths, slots,
    query_head, query_row, places, window, scale, softcap,
    PROMPTS: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr,
    KV: tl.constexpr, SHARES: tl.constexpr, GROUPS: tl.constexpr, WIDTH: tl.constexpr,
    TAKEN: tl.constexpr, FIRST: tl.constexpr, SPLITS: tl.constexpr, PARTS: tl.constexpr,
    D: tl.constexpr, DV: tl.constexpr, VALUES: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    blocks: tl.constexpr = (WIDTH + TAKEN - 1) // TAKEN
    REST: tl.constexpr = D if VALUES == DV else D - DV
    stretch, block = tl.program_id(0) // blocks, tl.program_id(0) % blocks
    if PROMPTS:  # noqa: SIM102  Triton would load `used` in any case
        if block * TAKEN >= tl.load(used + stretch):
            return
    head, split = tl.program_id(1), tl.program_id(2)
    m, n = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N)
    d, dv = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_DV)
    row, here = _query_rows(row_of_lane, used, stretch, block, m, GROUPS, WIDTH, TAKEN, PROMPTS)
    query_heads = head * GROUPS + m % GROUPS
    at = query + row * query_row + query_heads * query_head
    # Where values are the beginnings of keys, d counts the rest of a key alone.
    asked = _vectors(at + D - REST, d, here, REST)
    if REST < D:
        asked_first = _vectors(at, dv, here, DV)
    first = _first_seen(written, prompt, row, here, window, WINDOW, PROMPTS)
    base = (tl.load(slots + stretch) * KV + head // SHARES) * places
    start, end = _span(written, lengths, stretch, split, SPLITS, BLOCK_N, PROMPTS)
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    sought = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    for begin in range(start, end, BLOCK_N):
        place = begin + n
        key = _vectors(keys + (base + place) * D + D - REST, d, place < end, REST)
        value = _vectors(values + (base + place) * VALUES, dv, place < end, DV)
        products = _products(asked, key)
        if REST < D:
            products += _products(asked_first, value)
        seen = (place < end)[None, :]
        if WINDOW:
            seen = seen & (place[None, :] >= first[:, None])
        scores = _scores(products, seen, scale, softcap, SOFTCAP)
        top, total, sought = _with_block(top, total, sought, scores, value)
    log_sum, sought = _finished(top, total, sought)
    to = (row * (KV * SHARES * GROUPS) + query_heads) * PARTS + FIRST + split
    tl.store(sums + to, log_sum, mask=here)
    at = parts + to[:, None] * DV + dv[None, :]
    tl.store(at, sought, mask=here[:, None] & (dv < DV)[None, :])


@triton.jit
def _merge(
    parts, sums, sinks, out,
    HEADS: tl.constexpr, SINKS: tl.constexpr, PARTS: tl.constexpr, BLOCK_P: tl.constexpr,
    DV: tl.constexpr, BLOCK_DV: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0).to(tl.int64)
    p, dv = tl.arange(0, BLOCK_P), tl.arange(0, BLOCK_DV)
    log_sum = tl.load(sums + at * PARTS + p, mask=p < PARTS, other=float("-inf"))
    top = tl.max(log_sum, 0)
    if SINKS:
        sink = tl.load(sinks + at % HEADS).to(tl.float32)
        top = tl.maximum(top, sink)
    level = tl.where(top == float("-inf"), 0.0, top)
    weights = tl.exp(log_sum - level)
    total = tl.sum(weights, 0)
    if SINKS:
        total += tl.exp(sink - level)
    sought = tl.load(
        parts + (at * PARTS + p)[:, None] * DV + dv[None, :],
        mask=(p < PARTS)[:, None] & (dv < DV)[None, :],
        other=0.0,
    )
    merged = tl.sum(sought * weights[:, None], 0) / tl.where(total == 0.0, 1.0, total)
    tl.store(out + at * DV + dv, merged.to(out.dtype.element_ty), mask=dv < DV)


def splits(rows: int, heads: int) -> tuple[int, int]:
    """Into how many parts the stretches of prompts and of responses are cut, powers of two, so that
    there are about PROGRAMS programs. heads: key heads, or shares of the queries of latents.
    """

    def parts(programs: int) -> int:
        return min(MOST_PARTS, 1 << max(0, math.ceil(math.log2(PROGRAMS / programs))))

    return parts(-(-rows // LANES) * heads), parts(rows * heads)


class PagedDecoding:
    """One new token for each of the first N rows, as cache.Decoding, with kernels."""

    def __init__(
        self,
        cache: KeyValueCache,
        *,
        written: Tensor,
        prompt: Tensor,
        response: Tensor,
        length: Tensor,
        used: Tensor,
        stretch: Tensor,
        row_of_lane: Tensor,
        rows: int,
    ) -> None:
        """All int64, with an entry for each row of the cache. written: tokens of the response, the
        new one included; prompt: tokens of the prompt; response: where in the cache the response
        is. Of prompts: length, `used` lanes, and where in the cache `stretch` it is; row_of_lane:
        [capacity * LANES]. rows: N.
        """
        self._cache = cache
        self._written, self._prompt, self._response = written, prompt, response
        self._length, self._used, self._stretch = length, used, stretch
        self._row_of_lane, self._rows = row_of_lane, rows

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
        kv_heads, _, value_dim = value.shape
        groups = heads // kv_heads
        query, key, value = (
            t if t.stride(-1) == 1 else t.contiguous() for t in (query, key, value)
        )
        prompts, responses = self._cache.prompts, self._cache.responses
        sizes: dict[str, Any] = {
            "KV": kv_heads, "D": dim, "DV": value_dim, "BLOCK_D": _tile(dim),
            "BLOCK_DV": _tile(value_dim), "VALUES": responses.values[layer].stride(2),
        }  # fmt: skip
        _store[rows, kv_heads](  # pyright: ignore[reportIndexIssue]
            key, value, responses.keys[layer], responses.values[layer], self._written,
            self._response, key.stride(0), key.stride(1), value.stride(0), value.stride(1),
            responses.places, **sizes,
        )  # fmt: skip
        latent = sizes["VALUES"] > value_dim
        shares = _shares(groups) if latent else 1
        of_prompts, of_responses = splits(rows, kv_heads * shares)
        count = of_prompts + of_responses
        parts, sums = self._cache.scratch(rows * heads * count, value_dim)
        how = {
            "window": window or 0, "scale": scale, "softcap": softcap or 0.0,
            "WINDOW": window is not None, "SOFTCAP": softcap is not None,
            "GROUPS": groups // shares, "SHARES": shares, "PARTS": count, **sizes,
            "BLOCK_D": _tile(dim - value_dim if latent else dim),
        }  # fmt: skip
        runs = (prompts, 0, of_prompts), (responses, of_prompts, of_responses)
        for stretches, first, split in runs:
            self._attend(layer, query, stretches, parts, sums, first, split, how)
        return _merged(parts, sums, sinks, query.new_empty(rows, heads, value_dim), count)

    def _attend(
        self,
        layer: int,
        query: Tensor,
        stretches: Stretches,
        parts: Tensor,
        sums: Tensor,
        first: int,
        split: int,
        how: dict[str, Any],
    ) -> None:
        """The parts of prompts, or of responses, from part number `first` on."""
        of_prompts = stretches is self._cache.prompts
        width = LANES if of_prompts else 1
        bytes_each = query.element_size() * max(how["BLOCK_D"], how["BLOCK_DV"])
        block = max(16, min(64, TILE_BYTES // bytes_each))  # products take 16 rows at least
        groups = how["GROUPS"]
        taken = max(1, min(width, block // groups))
        taken = 1 << (taken.bit_length() - 1)
        blocks = -(-width // taken)
        grid = self._rows * blocks, how["KV"] * how["SHARES"], split
        _attend[grid](  # pyright: ignore[reportIndexIssue]
            query, stretches.keys[layer], stretches.values[layer], parts, sums, self._written,
            self._prompt, self._row_of_lane, self._used, self._length,
            self._stretch if of_prompts else self._response,
            query.stride(0), query.stride(1), stretches.places,
            PROMPTS=of_prompts, WIDTH=width, TAKEN=taken, FIRST=first, SPLITS=split,
            BLOCK_M=max(16, triton.next_power_of_2(taken * groups)), BLOCK_N=block,
            num_warps=4, num_stages=2, **how,
        )  # fmt: skip


def _merged(parts: Tensor, sums: Tensor, sinks: Tensor | None, out: Tensor, count: int) -> Tensor:
    """`out` [N, H, Dv], from the results of `count` parts of each row and head."""
    rows, heads, dim = out.shape
    _merge[(rows * heads,)](  # pyright: ignore[reportIndexIssue]
        parts, sums, sums if sinks is None else sinks, out, HEADS=heads, SINKS=sinks is not None,
        PARTS=count, BLOCK_P=triton.next_power_of_2(count), DV=dim, BLOCK_DV=_tile(dim),
    )  # fmt: skip
    return out


def _shares(groups: int) -> int:
    """Into how many equal shares the queries of a latent are divided, of at most QUERIES each."""
    return next(n for n in range(1, groups + 1) if groups % n == 0 and groups // n <= QUERIES)


def _tile(dim: int) -> int:
    """A size that products take, at least `dim`."""
    return max(16, triton.next_power_of_2(dim))
