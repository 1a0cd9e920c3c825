"""Randomness from counters: the same (seed, stream, counters) give the same number, in any order.

There is no generator state to save, and a sequence draws the same numbers whatever shares its
batch. The mixing function is SplitMix64's finaliser (Steele, Lea and Flood, 2014), applied once
for each counter.
"""

import zlib

import numpy as np
from numpy.typing import ArrayLike, NDArray

GOLDEN = np.uint64(0x9E3779B97F4A7C15)
MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
MIX_2 = np.uint64(0x94D049BB133111EB)


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    x = (x ^ (x >> np.uint64(30))) * MIX_1
    x = (x ^ (x >> np.uint64(27))) * MIX_2
    return x ^ (x >> np.uint64(31))


def bits(seed: int, stream: str, *counters: ArrayLike) -> NDArray[np.uint64]:
    """64 random bits for each element of the broadcast `counters`.

    `stream` keeps uses apart ("sample", "shuffle"): two streams share no numbers. Counters are
    non-negative integers. Returns an array of the broadcast shape (0-d without counters).
    """
    with np.errstate(over="ignore"):  # wrapping modulo 2**64 is the arithmetic that is meant
        state = _mix(np.asarray(seed % 2**64, np.uint64) + GOLDEN)
        state = _mix((state ^ np.uint64(zlib.crc32(stream.encode()))) + GOLDEN)
        for counter in counters:
            state = _mix((state ^ np.asarray(counter).astype(np.uint64)) + GOLDEN)
    return state


def uniform(seed: int, stream: str, *counters: ArrayLike) -> NDArray[np.float64]:
    """A number in [0, 1) with 53 random bits for each element of the broadcast `counters`."""
    return (bits(seed, stream, *counters) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def permutation(n: int, seed: int, stream: str, *counters: int) -> NDArray[np.int64]:
    """A permutation of range(n) that depends on nothing but its arguments."""
    keys = bits(seed, stream, *counters, np.arange(n, dtype=np.uint64))
    return np.argsort(keys, kind="stable")


def integer(seed: int, stream: str, *counters: int) -> int:
    """A seed below 2**31 for libraries that want one."""
    return int(bits(seed, stream, *counters)) >> 33
