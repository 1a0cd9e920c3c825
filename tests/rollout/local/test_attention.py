"""Decoding over the cache, against float64 NumPy."""

import numpy as np
import pytest
import torch

from postgrad.rollout.local.budget import SharedPrompts
from postgrad.rollout.local.cache import Decoding, KeyValueCache, LayerShape
from postgrad.rollout.local.prompts import Recording

CPU = torch.device("cpu")
HEADS, KV, DIM, VALUE_DIM = 4, 2, 8, 6


PROMPTS = [7, 1, 12]  # tokens
STRETCHES = [1, 0, 2, 1, 1]  # which prompt each row reads


def filled_cache(slots=5, places=16):
    cache = KeyValueCache(
        (LayerShape(KV, DIM, VALUE_DIM),) * 2, slots * 2 * places, torch.float32, CPU
    )
    cache.divide(slots, places, places)
    generator = torch.Generator().manual_seed(0)
    for stretches in (cache.prompts, cache.responses):
        for store in (*stretches.keys, *stretches.values):
            store.copy_(torch.randn(store.shape, generator=generator))
    return cache


def decoding(cache, stretches, lengths, places):
    """Of rows at `places`; those behind the ones that read `stretches` are idle."""
    shared = SharedPrompts(8)
    for name, length in enumerate(lengths):
        shared.join(name, length, 1)
    lanes = shared.lanes(np.array(stretches))
    lane_of_row = np.pad(lanes.lane_of_row, (0, len(places) - len(stretches)))
    return Decoding(
        cache,
        places=torch.tensor(places),
        lengths=torch.from_numpy(lanes.lengths),
        row_of_lane=torch.from_numpy(lanes.row_of_lane),
        lane_of_row=torch.from_numpy(lane_of_row),
        width=lanes.width,
        prompt_places=16,
        response_places=16,
    )


def by_hand(query, keys, values, position, scale, window, softcap, sinks):
    """One row's attention in float64: query [H, D], keys [KV, places, D]; returns [H, Dv]."""
    first = 0 if window is None else max(0, position - window + 1)
    out = []
    for head in range(HEADS):
        kv = head // (HEADS // KV)
        scores = keys[kv, first : position + 1] @ query[head] * scale
        if softcap is not None:
            scores = softcap * np.tanh(scores / softcap)
        weights = np.exp(scores)
        total = weights.sum() + (0.0 if sinks is None else np.exp(sinks[head]))
        out.append(weights / total @ values[kv, first : position + 1])
    return np.stack(out)


@pytest.mark.parametrize("sinks", [None, [-1.0, 0.0, 2.0, 9.0]])
@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("window", [None, 3, 9, 100])
def test_every_row_attends_to_its_prompt_its_response_and_its_new_token(window, softcap, sinks):
    cache = filled_cache()
    places = [5, 0, 9, 2, 5]
    torch.manual_seed(1)
    query = torch.randn(HEADS, 5, DIM)
    key, value = torch.randn(KV, 5, DIM), torch.randn(KV, 5, VALUE_DIM)
    context = decoding(cache, STRETCHES, PROMPTS, places)
    learned = None if sinks is None else torch.tensor(sinks)
    attended = context.attend(
        1, query, key, value, scale=0.3, window=window, softcap=softcap, sinks=learned
    )
    for row, (stretch, place) in enumerate(zip(STRETCHES, places, strict=True)):
        torch.testing.assert_close(cache.responses.keys[1][row, :, place], key[:, row])
        keys, values = (
            torch.cat([old[1][stretch, :, : PROMPTS[stretch]], new[1][row, :, : place + 1]], 1)
            for old, new in (
                (cache.prompts.keys, cache.responses.keys),
                (cache.prompts.values, cache.responses.values),
            )
        )
        expected = by_hand(
            query[:, row].double().numpy(),
            keys.double().numpy(),
            values.double().numpy(),
            PROMPTS[stretch] + place,
            0.3,
            window,
            softcap,
            sinks,
        )
        np.testing.assert_allclose(attended[row].numpy(), expected, atol=1e-5)


def test_decoding_writes_one_place_a_row_and_no_other_layer():
    cache, before = filled_cache(), filled_cache()
    new = torch.ones(KV, 2, DIM), torch.ones(KV, 2, VALUE_DIM)
    decoding(cache, [0, 0], [4], [2, 4]).attend(
        0, torch.zeros(HEADS, 2, DIM), *new, scale=1.0, window=None, softcap=None
    )
    new_keys, old = cache.responses.keys, before.responses.keys
    changed = (new_keys[0] != old[0]).all(-1).nonzero().tolist()
    assert changed == [[0, 0, 2], [0, 1, 2], [1, 0, 4], [1, 1, 4]]
    torch.testing.assert_close(new_keys[1], old[1])
    torch.testing.assert_close(cache.prompts.keys[0], before.prompts.keys[0])


@pytest.mark.parametrize("window", [None, 3])
def test_idle_rows_change_nothing_for_others_and_write_their_first_place_alone(window):
    torch.manual_seed(1)
    query = torch.randn(HEADS, 5, DIM)
    key, value = torch.randn(KV, 5, DIM), torch.randn(KV, 5, VALUE_DIM)
    before, attended = filled_cache(), []
    for idle in (0, 2):
        cache, rows = filled_cache(), 5 - 2 + idle
        context = decoding(cache, STRETCHES[:3], PROMPTS, [5, 0, 9, 0, 0][:rows])
        row_inputs = (each[:, :rows] for each in (query, key, value))
        attended.append(context.attend(1, *row_inputs, scale=0.3, window=window, softcap=None))
    assert attended[1].isfinite().all()
    torch.testing.assert_close(attended[1][:3], attended[0], atol=1e-6, rtol=0.0)
    changed = (cache.responses.keys[1] != before.responses.keys[1]).any(-1).any(1).nonzero()
    assert changed.tolist() == [[0, 5], [1, 0], [2, 9], [3, 0], [4, 0]]


def test_recording_hands_on_and_keeps_what_every_layer_saw():
    class Inner:
        def attend(self, layer, query, key, value, *, scale, window, softcap, sinks):
            return torch.full((1,), layer * scale * window)

    recording = Recording(Inner())
    key, value = torch.zeros(KV, 3, DIM), torch.ones(KV, 3, VALUE_DIM)
    out = recording.attend(2, key, key, value, scale=0.5, window=3, softcap=None)
    assert out.item() == 3.0
    assert recording.shapes == (LayerShape(KV, DIM, VALUE_DIM),)
    assert recording.values[0] is value
