"""The key-value cache."""

import numpy as np
import pytest
import torch

from postgrad.rollout.local.budget import align, places_for
from postgrad.rollout.local.cache import KeyValueCache, LayerShape, bytes_per_token

CPU = torch.device("cpu")


def test_places_are_counted_in_whole_cache_lines():
    assert [align(n) for n in (1, 16, 17, 100)] == [16, 16, 32, 112]


def test_room_for_a_length_is_enough_however_prompt_and_response_share_it():
    for length in (2, 16, 33, 100):
        for prompt in range(1, length):
            assert align(prompt) + align(length - prompt) <= places_for(length)


def test_a_token_of_bytes_is_keys_and_values_of_all_layers():
    shapes = (LayerShape(2, 64, 64), LayerShape(1, 8, 4))
    assert bytes_per_token(shapes, torch.float32) == 4 * (2 * 128 + 12)
    assert bytes_per_token(shapes, torch.bfloat16) == 2 * (2 * 128 + 12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_new_cache_is_zero_and_its_stretches_start_on_cache_lines(dtype):
    cache = KeyValueCache((LayerShape(2, 5, 3),), 128, dtype, CPU)
    cache.divide(2, 32, 16)
    assert cache.prompts.keys[0].shape == (2, 2, 32, 5)
    assert cache.prompts.values[0].shape == (2, 2, 32, 3)
    assert cache.responses.keys[0].shape == (2, 2, 16, 5)
    assert cache.responses.values[0].shape == (2, 2, 16, 3)
    assert not cache.prompts.keys[0].any()
    assert cache.prompts.keys[0].dtype == dtype
    for stretches in (cache.prompts, cache.responses):
        for store in (stretches.keys[0], stretches.values[0]):
            assert store.data_ptr() % 64 == 0
            assert store[1].data_ptr() % 64 == 0


def test_values_of_latents_are_the_beginnings_of_their_keys():
    shape = LayerShape(1, 6, 4, latent=True)
    assert bytes_per_token((shape,), torch.float32) == 4 * 6
    cache = KeyValueCache((shape,), 96, torch.float32, CPU)
    cache.divide(2, 32, 16)
    cache.responses.keys[0][:] = torch.arange(6.0)
    assert cache.responses.values[0].shape == (2, 1, 16, 4)
    assert torch.equal(cache.responses.values[0], torch.arange(4.0).expand(2, 1, 16, 4))
    assert not cache.prompts.values[0].any()


def test_prompts_and_responses_do_not_overlap_in_the_allocation():
    cache = KeyValueCache((LayerShape(1, 4, 4),), 96, torch.float32, CPU)
    cache.divide(2, 32, 16)
    cache.prompts.keys[0].fill_(1.0)
    cache.responses.keys[0].fill_(2.0)
    assert bool((cache.prompts.keys[0] == 1.0).all())
    assert not cache.prompts.values[0].any()


def test_dividing_anew_uses_the_same_allocation():
    cache = KeyValueCache((LayerShape(1, 4, 4),), 128, torch.float32, CPU)
    cache.divide(4, 16, 16)
    before = cache.prompts.keys[0].data_ptr()
    cache.divide(2, 32, 32)
    assert cache.prompts.keys[0].data_ptr() == before
    with pytest.raises(ValueError, match=r"5 slots of 16 \+ 16 places do not fit into 128"):
        cache.divide(5, 16, 16)


def test_moving_stretches_copies_keys_and_values_of_every_layer():
    cache = KeyValueCache((LayerShape(1, 2, 2),) * 2, 128, torch.float32, CPU)
    cache.divide(4, 16, 16)
    for stretches in (cache.prompts, cache.responses):
        for store in (*stretches.keys, *stretches.values):
            store[:] = torch.arange(4.0)[:, None, None, None]
    lengths = np.array([5, 9, 9, 9])
    cache.responses.move(np.array([0]), np.array([3]), lengths)
    for store in (*cache.responses.keys, *cache.responses.values):
        assert store[0, 0, :, 0].tolist() == [3.0] * 5 + [0.0] * 11
        assert store[3, 0, 0, 0] == 3.0
    assert not cache.prompts.keys[0][0].any()


def test_where_nothing_is_copied_moved_stretches_are_looked_up_where_they_stay():
    cache = KeyValueCache((LayerShape(1, 2, 2),), 5 * 32, torch.float32, torch.device("meta"))
    cache.divide(5, 16, 16)
    lengths = np.full(5, 9)
    cache.responses.move(np.array([0, 1]), np.array([4, 3]), lengths)
    assert cache.responses.place.tolist() == [4, 3, 2, 1, 0]
    cache.responses.move(np.array([1]), np.array([2]), lengths)
    assert cache.responses.place.tolist() == [4, 2, 3, 1, 0]
    assert cache.prompts.place.tolist() == [0, 1, 2, 3, 4]


def test_what_kernels_leave_for_each_other_stays_where_it_is_until_the_cache_is_given_back():
    cache = KeyValueCache((LayerShape(1, 2, 2),), 64, torch.float32, CPU)
    wide, narrow = cache.scratch(6, 4)
    assert (wide.shape, narrow.shape) == ((6, 4), (6,))
    assert cache.scratch(6, 4)[0] is wide
    assert cache.scratch(8, 4)[0] is not wide
    cache.release()
    assert cache.scratch(6, 4)[0] is not wide


def test_a_cache_that_was_given_back_is_zero_again_where_it_is_next_laid_out():
    cache = KeyValueCache((LayerShape(2, 5, 3),), 128, torch.float32, CPU)
    cache.divide(2, 32, 16)
    cache.prompts.keys[0].fill_(1.0)
    cache.release()
    assert (cache.prompts.keys, cache.responses.values) == ((), ())
    cache.divide(4, 16, 16)
    assert cache.prompts.keys[0].shape == (4, 2, 16, 5)
    assert not cache.prompts.keys[0].any()
