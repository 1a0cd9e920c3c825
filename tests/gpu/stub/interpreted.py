"""Runs the kernels of decode attention in Triton's interpreter, on a CPU, against float64. Prints
as JSON the largest error of each case and the places of the cache that were written; under "filled"
whether prompts are copied into the cache as they are, and nothing else is.
"""

import json
import os

os.environ["TRITON_INTERPRET"] = "1"

from typing import Any

import numpy as np
import torch
from triton.runtime import interpreter  # pyright: ignore[reportMissingImports]

from postgrad.rollout.local.budget import LANES, SharedPrompts
from postgrad.rollout.local.cache import KeyValueCache, LayerShape
from postgrad.rollout.local.paged import PagedDecoding, fill

patch_tensor = interpreter._patch_lang_tensor


def patch_with_index(tensor: Any, scope: Any) -> None:
    """Triton 3.6 reads a scalar in a way that NumPy 2.4 refuses. This is how Triton 3.7 does."""
    patch_tensor(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.squeeze()))


interpreter._patch_lang_tensor = patch_with_index

PROMPTS = [37, 1, 20]  # tokens
STRETCHES = [1, 0, 2, 0, 0, *[2] * 14]  # which prompt each row reads
PLACES = [5, 0, 40, 2, 17, *range(14)]  # of the new token of each row in its response
CAPACITY, ROWS = 24, 21  # two rows are idle
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"window": 12},
    "narrow window": {"window": 1},
    "soft-cap": {"softcap": 1.5},
    "window and soft-cap": {"window": 30, "softcap": 1.5},
    "sinks": {"sinks": (-1.0, 0.0, 2.0, 9.0)},
    "narrow window and sinks": {"window": 1, "sinks": (-1.0, 0.0, 2.0, 9.0)},
    "heads of 24 and 8": {"dim": 24, "value_dim": 8},
    "one query a key": {"groups": 1},
    "seven queries a key": {"groups": 7},
    "latents": {"dim": 24, "value_dim": 16, "kv_heads": 1, "groups": 4, "latent": True},
    "latents of forty heads": {
        "dim": 40,
        "value_dim": 32,
        "kv_heads": 1,
        "groups": 40,
        "latent": True,
    },
    "latents in a window": {
        "dim": 18,
        "value_dim": 16,
        "kv_heads": 1,
        "groups": 4,
        "latent": True,
        "window": 12,
    },
    "float16": {"dtype": torch.float16},  # the interpreter multiplies no bfloat16
}


def by_hand(
    query: Any,
    keys: Any,
    values: Any,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: Any,
) -> Any:
    """One row in float64: query [KV, G, D], keys and values [KV, tokens, D]. [KV, G, Dv]."""
    first = 0 if window is None else max(0, keys.shape[1] - window)
    scores = query @ keys[:, first:].transpose(1, 2) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if sinks is None:
        return scores.softmax(-1) @ values[:, first:]
    column = sinks.double().view(*scores.shape[:2], 1)
    return torch.cat([scores, column], -1).softmax(-1)[..., :-1] @ values[:, first:]


def case(
    *,
    window: int | None = None,
    softcap: float | None = None,
    sinks: tuple[float, ...] | None = None,
    dim: int = 16,
    value_dim: int = 16,
    groups: int = 2,
    kv_heads: int = 2,
    latent: bool = False,
    dtype: torch.dtype = torch.float32,
) -> dict[str, Any]:
    torch.manual_seed(0)
    shape = LayerShape(kv_heads, dim, value_dim, latent)
    cache = KeyValueCache((shape,) * 2, CAPACITY * 112, dtype, torch.device("cpu"))
    cache.divide(CAPACITY, 48, 64)
    for stretches in (cache.prompts, cache.responses):
        for store in (*stretches.keys, *stretches.values):
            store.copy_(torch.randn(store.shape))
    before = cache.responses.keys[1].clone()
    mixed = np.random.default_rng(1)
    response, place = mixed.permutation(CAPACITY), mixed.permutation(CAPACITY)
    shared = SharedPrompts(CAPACITY)
    for name, length in enumerate(PROMPTS):
        shared.join(name, length, 1)
    count = len(STRETCHES)
    lanes = shared.lanes(np.array(STRETCHES), LANES)

    def column(numbers: Any) -> torch.Tensor:
        padded = np.zeros(CAPACITY, np.int64)
        padded[: len(numbers)] = numbers
        return torch.from_numpy(padded)

    row_of_lane = np.zeros(CAPACITY * LANES, np.int64)
    row_of_lane[: len(lanes.row_of_lane)] = lanes.row_of_lane
    context = PagedDecoding(
        cache,
        written=column(np.array(PLACES) + 1),
        prompt=column([PROMPTS[stretch] for stretch in STRETCHES]),
        response=column(response),
        length=column(lanes.lengths),
        used=column(lanes.used),
        stretch=column(place),
        row_of_lane=torch.from_numpy(row_of_lane),
        rows=ROWS,
    )
    query = torch.randn(ROWS, kv_heads * groups, dim).to(dtype).transpose(0, 1)
    key, value = (
        torch.randn(ROWS, kv_heads, d).to(dtype).transpose(0, 1) for d in (dim, value_dim)
    )
    if latent:
        value = key[..., :value_dim]
    learned = None if sinks is None else torch.tensor(sinks).to(dtype)
    result = context.attend(
        1, query, key, value, scale=0.3, window=window, softcap=softcap, sinks=learned
    )
    errors = []
    for row in range(count):
        new, old = int(response[row]), int(place[STRETCHES[row]])
        length, end = PROMPTS[STRETCHES[row]], PLACES[row] + 1
        keys, values = (
            torch.cat([o[1][old, :, :length], n[1][new, :, :end]], 1).double()
            for o, n in (
                (cache.prompts.keys, cache.responses.keys),
                (cache.prompts.values, cache.responses.values),
            )
        )
        assert torch.equal(cache.responses.keys[1][new, :, end - 1], key[:, row])
        assert torch.equal(cache.responses.values[1][new, :, end - 1], value[:, row])
        asked = query[:, row].double().view(kv_heads, groups, dim)
        expected = by_hand(asked, keys, values, 0.3, window, softcap, learned).view(-1, value_dim)
        errors.append((result[row].double() - expected).abs().max().item())
    changed = (cache.responses.keys[1] != before).any(-1).any(1).nonzero().tolist()
    places = [[int(response[row]), place] for row, place in enumerate([*PLACES, 0, 0])]
    return {
        "error": max(errors),
        "as expected": sorted(changed) == sorted(places),
        "finite": bool(result.isfinite().all()),
    }


def filled(dim: int, value_dim: int, dtype: torch.dtype, latent: bool = False) -> bool:
    """Whether three of four packed prompts arrive at their places, and nothing else changes."""
    torch.manual_seed(0)
    lengths = np.array([*PROMPTS, 45])
    starts = np.concatenate([[0], np.cumsum(lengths)])
    shape = LayerShape(1 if latent else 2, dim, value_dim, latent)
    cache = KeyValueCache((shape,) * 2, CAPACITY * 112, dtype, torch.device("cpu"))
    cache.divide(CAPACITY, 48, 64)
    stores = [*cache.prompts.keys, *cache.prompts.values]
    for store in stores:
        store.copy_(torch.randn(store.shape))
    expected = [store.clone() for store in stores]
    packed = [
        torch.randn(shape.heads, int(starts[-1]), store.shape[-1]).to(dtype) for store in stores
    ]
    if latent:
        packed[2:] = [keys[..., :value_dim] for keys in packed[:2]]
    prompts, places, behind = np.array([2, 0, 1]), np.array([7, 23, 0]), np.array([0, 5, 0])
    table = torch.from_numpy(np.stack([starts[prompts], lengths[prompts], places, behind]))
    layers = zip(packed[:2], packed[2:], strict=True)
    fill(cache.prompts, layers, table, int(lengths[prompts].max()))
    for prompt, place, first in zip(prompts, places, behind, strict=True):
        span = slice(int(starts[prompt]), int(starts[prompt + 1]))
        for store, tokens in zip(expected, packed, strict=True):
            store[place, :, first : first + lengths[prompt]] = tokens[:, span]
    return all(map(torch.equal, stores, expected))


if __name__ == "__main__":
    kinds = ((16, 16, torch.float32), (24, 8, torch.float32), (64, 64, torch.float16))
    attended = {name: case(**how) for name, how in CASES.items()}
    copied = [*(filled(*kind) for kind in kinds), filled(24, 16, torch.float32, latent=True)]
    print(json.dumps({"attended": attended, "filled": copied}))
