"""Randomness from counters: any order, the same numbers."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from postgrad.core.seeds import bits, integer, permutation, uniform

COUNTERS = st.integers(0, 2**40)


def splitmix(seed: int) -> int:
    """SplitMix64's next number, in Python's own integers."""
    z = (seed + 0x9E3779B97F4A7C15) % 2**64
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
    return z ^ (z >> 31)


def test_the_mixing_function_is_splitmix64() -> None:
    """The first output of the published generator for seed 0."""
    assert splitmix(0) == 0xE220A8397B1DCDAF
    crc_of_x = 0x8CDC1683  # crc32 of "x", which names the stream
    assert int(bits(0, "x")) == splitmix(splitmix(0) ^ crc_of_x)


def test_known_numbers_do_not_change_between_versions() -> None:
    """A checkpoint of an older version draws the same samples."""
    assert int(bits(7, "sample", 3, 1, 0, 5)) == int(
        splitmix(splitmix(splitmix(splitmix(splitmix(splitmix(7) ^ 0xF10B76C3) ^ 3) ^ 1) ^ 0) ^ 5)
    )
    assert permutation(8, 1, "data", 0).tolist() == sorted(
        range(8), key=lambda i: splitmix(splitmix(splitmix(splitmix(1) ^ 0xADF3F363) ^ 0) ^ i)
    )


@given(seed=COUNTERS, counters=st.lists(COUNTERS, min_size=1, max_size=20))
def test_a_number_does_not_depend_on_what_it_is_drawn_with(seed: int, counters: list[int]) -> None:
    together = bits(seed, "sample", np.array(counters, np.uint64))
    assert together.tolist() == [int(bits(seed, "sample", counter)) for counter in counters]


@given(n=st.integers(0, 200), seed=COUNTERS, epoch=st.integers(0, 100))
def test_a_permutation_has_every_place_once(n: int, seed: int, epoch: int) -> None:
    assert sorted(permutation(n, seed, "data", epoch).tolist()) == list(range(n))


def test_uniform_numbers_fill_zero_to_one_evenly() -> None:
    drawn = uniform(0, "sample", np.arange(100_000))
    assert 0.0 <= drawn.min() < drawn.max() < 1.0
    counts = np.histogram(drawn, 10, (0.0, 1.0))[0]
    assert abs(counts - 10_000).max() < 400  # four deviations are 380
    assert abs(np.corrcoef(drawn[:-1], drawn[1:])[0, 1]) < 0.02


def test_streams_and_seeds_share_no_numbers() -> None:
    sample_bits = bits(0, "sample", np.arange(1000))
    assert not set(sample_bits.tolist()) & set(bits(0, "data", np.arange(1000)).tolist())
    assert not set(sample_bits.tolist()) & set(bits(1, "sample", np.arange(1000)).tolist())


@given(seed=st.integers(0, 2**70))
def test_integers_are_what_other_libraries_take_as_seeds(seed: int) -> None:
    assert 0 <= integer(seed, "init") < 2**31
