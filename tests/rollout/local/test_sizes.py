"""Sizes chosen at start."""

import pytest

from postgrad.core.errors import UsageError
from postgrad.fleet.engines import probe_sizes
from postgrad.rollout.local.budget import EngineSizes, choose_sizes
from postgrad.rollout.settings import RolloutSettings

GIB = 2**30


@pytest.mark.parametrize(
    ("recipe", "sequences", "max_len", "expected"),
    [
        ({}, 512, 96, EngineSizes(512, 512 * 112)),
        ({}, 100, 96, EngineSizes(100, 11200)),
        ({}, 4096, 90, EngineSizes(512, 512 * 112)),
        # a quarter of 1 GiB is 65 536 places of 4 KiB: 63 sequences of 1 024, prompts and responses
        # rounded up
        ({}, 4096, 1024, EngineSizes(63, 65520)),
        ({"slots": 8}, 512, 96, EngineSizes(8, 896)),
        ({"cache_tokens": 1000}, 512, 96, EngineSizes(8, 1000)),
        ({"slots": 3, "cache_tokens": 1000}, 512, 96, EngineSizes(3, 1000)),
        # memory for less than one sequence still gets one
        ({}, 512, 100_000, EngineSizes(1, 100_016)),
    ],
)
def test_slots_follow_the_step_the_memory_and_the_recipe(recipe, sequences, max_len, expected):
    sizes = choose_sizes(
        RolloutSettings(**recipe),
        sequences=sequences,
        max_len=max_len,
        token_bytes=4096,
        free_bytes=GIB,
    )
    assert sizes == expected


def test_states_of_recurrent_layers_take_room_of_the_cache():
    """Of a quarter of 1 GiB each sequence of 112 places takes 112 * 4 KiB and a state of 448 KiB,
    or, where no layer attends, the state alone.
    """
    ask = {"sequences": 4096, "max_len": 96, "free_bytes": GIB, "row_bytes": 448 * 1024}
    assert choose_sizes(RolloutSettings(), token_bytes=4096, **ask).slots == 292
    assert choose_sizes(RolloutSettings(), token_bytes=0, **ask).slots == 512


def test_a_cache_smaller_than_one_sequence_is_named_with_what_it_needs():
    with pytest.raises(
        UsageError, match=r"rollout.cache_tokens = 64 .* 100 tokens .* at least 128"
    ):
        choose_sizes(
            RolloutSettings(cache_tokens=64),
            sequences=1,
            max_len=100,
            token_bytes=1,
            free_bytes=GIB,
        )


def test_sizes_are_probed_from_a_model_and_kept_as_json(model):
    sizes = probe_sizes(model("gemma2"), RolloutSettings(), sequences=32, max_len=40)
    assert sizes.to_json() == {"slots": 32, "cache_tokens": 32 * 64}
