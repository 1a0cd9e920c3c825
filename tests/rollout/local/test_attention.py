"""Decoding over the cache, against float64 NumPy."""

import numpy as np
import pytest
import torch

from postgrad.rollout.local.attention import Decoding, Recording
from postgrad.rollout.local.cache import KeyValueCache, LayerShape

HEADS, KV, DIM, VALUE_DIM = 4, 2, 8, 6


def filled_cache(slots=4, places=16):
    cache = KeyValueCache(
        (LayerShape(KV, DIM, VALUE_DIM),) * 2, slots * places, torch.float32, torch.device("cpu")
    )
    cache.divide(slots, places)
    generator = torch.Generator().manual_seed(0)
    for store in (*cache.keys, *cache.values):
        store.copy_(torch.randn(store.shape, generator=generator))
    return cache


def by_hand(query, keys, values, position, scale, window, softcap):
    """One row's attention in float64: query [H, D], keys [KV, places, D]; returns [H, Dv]."""
    first = 0 if window is None else max(0, position - window + 1)
    out = []
    for head in range(HEADS):
        kv = head // (HEADS // KV)
        scores = keys[kv, first : position + 1] @ query[head] * scale
        if softcap is not None:
            scores = softcap * np.tanh(scores / softcap)
        weights = np.exp(scores - scores.max())
        out.append(weights / weights.sum() @ values[kv, first : position + 1])
    return np.stack(out)


@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("window", [None, 3, 100])
def test_every_row_attends_to_its_own_places_and_its_new_token(window, softcap):
    cache = filled_cache()
    positions = torch.tensor([5, 0, 9])
    torch.manual_seed(1)
    query = torch.randn(HEADS, 3, DIM)
    key, value = torch.randn(KV, 3, DIM), torch.randn(KV, 3, VALUE_DIM)
    context = Decoding(cache, positions, 10)
    found = context.attend(1, query, key, value, scale=0.3, window=window, softcap=softcap)
    for row, position in enumerate(positions.tolist()):
        torch.testing.assert_close(cache.keys[1][row, :, position], key[:, row])
        expected = by_hand(
            query[:, row].double().numpy(),
            cache.keys[1][row].double().numpy(),
            cache.values[1][row].double().numpy(),
            position,
            0.3,
            window,
            softcap,
        )
        np.testing.assert_allclose(found[row].numpy(), expected, atol=1e-5)


def test_decoding_writes_one_place_a_row_and_no_other_layer():
    cache, before = filled_cache(), filled_cache()
    new = torch.ones(KV, 2, DIM), torch.ones(KV, 2, VALUE_DIM)
    Decoding(cache, torch.tensor([2, 4]), 5).attend(
        0, torch.zeros(HEADS, 2, DIM), *new, scale=1.0, window=None, softcap=None
    )
    changed = (cache.keys[0] != before.keys[0]).all(-1).nonzero().tolist()
    assert changed == [[0, 0, 2], [0, 1, 2], [1, 0, 4], [1, 1, 4]]
    torch.testing.assert_close(cache.keys[1], before.keys[1])


def test_recording_hands_on_and_keeps_what_every_layer_saw():
    class Inner:
        def attend(self, layer, query, key, value, *, scale, window, softcap):
            return torch.full((1,), layer * scale * window)

    recording = Recording(Inner())
    key, value = torch.zeros(KV, 3, DIM), torch.ones(KV, 3, VALUE_DIM)
    out = recording.attend(2, key, key, value, scale=0.5, window=3, softcap=None)
    assert out.item() == 3.0
    assert recording.shapes == (LayerShape(KV, DIM, VALUE_DIM),)
    assert recording.values[0] is value
