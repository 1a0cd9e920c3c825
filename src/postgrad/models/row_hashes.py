"""Random bits for every feature of every row of a forward, from counters: a hash of the row's key
and of the feature (core/seeds.py), on the device that computes.

What is drawn from them needs no state, and is the same wherever a row is computed.
"""

import sys

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

LANES = 4  # features that share one 64-bit hash, 16 bits each: a quarter of the arithmetic
STEPS = 2**16  # numbers that a feature's bits can be


def lanes_of(width: int) -> NDArray[np.int64]:
    """The numbers of the hashes that `width` features share."""
    return np.arange(-(-width // LANES))


def row_bits(rows: Tensor, lanes: Tensor, width: int) -> Tensor:
    """[T, width] int16, uniform from -2**15 up. rows: int64 [T], a key of each; lanes: int64, the
    hash of each of lanes_of(width).
    """
    # the order within a hash depends on the byte order, which has to be the same on all machines
    assert sys.byteorder == "little"
    return mixed(rows[:, None] ^ lanes).view(torch.int16)[:, :width]


def mixed(x: Tensor) -> Tensor:
    """SplitMix64's finaliser, as in core/seeds.py: products wrap, shifts fill with zeros."""
    x = (x ^ _shifted(x, 30)) * signed(0xBF58476D1CE4E5B9)
    x = (x ^ _shifted(x, 27)) * signed(0x94D049BB133111EB)
    return x ^ _shifted(x, 31)


def signed(number: int) -> int:
    """The same 64 bits as a signed number, which is all that torch has."""
    return number - 2**64 if number >= 2**63 else number


def _shifted(x: Tensor, n: int) -> Tensor:
    return (x >> n) & (2 ** (64 - n) - 1)
