"""The key-value cache."""

import pytest
import torch

from postgrad.rollout.local.cache import KeyValueCache, LayerShape, align, bytes_per_token

CPU = torch.device("cpu")


def test_places_are_counted_in_whole_cache_lines():
    assert [align(n) for n in (1, 16, 17, 100)] == [16, 16, 32, 112]


def test_a_token_of_bytes_is_keys_and_values_of_all_layers():
    shapes = (LayerShape(2, 64, 64), LayerShape(1, 8, 4))
    assert bytes_per_token(shapes, torch.float32) == 4 * (2 * 128 + 12)
    assert bytes_per_token(shapes, torch.bfloat16) == 2 * (2 * 128 + 12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_new_cache_is_zero_and_starts_on_a_cache_line(dtype):
    cache = KeyValueCache((LayerShape(2, 5, 3),), 64, dtype, CPU)
    cache.divide(2, 32)
    assert cache.keys[0].shape == (2, 2, 32, 5)
    assert cache.values[0].shape == (2, 2, 32, 3)
    assert not cache.keys[0].any()
    assert cache.keys[0].dtype == dtype
    assert cache.keys[0].data_ptr() % 64 == 0


def test_dividing_anew_uses_the_same_allocation():
    cache = KeyValueCache((LayerShape(1, 4, 4),), 64, torch.float32, CPU)
    cache.divide(4, 16)
    before = cache.keys[0].data_ptr()
    cache.divide(2, 32)
    assert cache.keys[0].data_ptr() == before
    with pytest.raises(ValueError, match="5 slots of 16 places are over 64"):
        cache.divide(5, 16)


def test_moving_rows_copies_keys_and_values_of_every_layer():
    cache = KeyValueCache((LayerShape(1, 2, 2),) * 2, 64, torch.float32, CPU)
    cache.divide(4, 16)
    for store in (*cache.keys, *cache.values):
        store[:] = torch.arange(4.0)[:, None, None, None]
    cache.move(torch.tensor([0]), torch.tensor([3]), 5)
    for store in (*cache.keys, *cache.values):
        assert store[0, 0, :, 0].tolist() == [3.0] * 5 + [0.0] * 11
        assert store[3, 0, 0, 0] == 3.0
