"""How fast this processor multiplies: measured once at the start of a run, never at a resume.

Processors with bfloat16 instructions multiply it three to ten times faster than float32, others not
at all; and two threads on a busy machine can be slower than one. A few products say which.
"""

import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn

ROWS = 512  # tokens of a small micro-batch
ROUNDS, LEAST = 7, 3  # alternating, so that a machine that gets busy does so for all sides
MOST_SECONDS = 0.2  # by the clock, of one question; the LEAST rounds are always made
WIDEST = 1024  # of a larger model a part of the matrix says the same
NARROWEST = 256  # below it the time goes into what is not a product
CLEARLY = 1.5  # so much faster must products be, for what is not one, half of a step, is no faster
WORTH = 0.9  # more threads are taken where they leave at most this share of the time


Multiply = Callable[[Tensor, Tensor], Tensor]  # states [N, K] and a weight [M, K]: [N, M]


def bfloat16_pays(hidden: int, intermediate: int, multiply: Multiply) -> bool:
    """True where `multiply`, which the run multiplies with, takes a layer of this size clearly
    faster in bfloat16 than in float32, by CPU time of one thread.
    """
    if hidden < NARROWEST:
        return False
    products = [
        _product(hidden, intermediate, dtype, multiply) for dtype in (torch.float32, torch.bfloat16)
    ]
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        plain, narrow = _medians(products, time.process_time)
    finally:
        torch.set_num_threads(before)
    return plain >= CLEARLY * narrow


def useful_threads(most: int) -> int:
    """`most`, or 1 where one thread multiplies as fast by the clock: the machine has no cores to
    spare now.
    """
    if most == 1:
        return 1
    product = _product(WIDEST, WIDEST, torch.float32, nn.functional.linear)

    def with_threads(threads: int) -> Callable[[], object]:
        def run() -> object:
            torch.set_num_threads(threads)
            return product()

        return run

    before = torch.get_num_threads()
    try:
        single, several = _medians([with_threads(1), with_threads(most)], time.perf_counter)
    finally:
        torch.set_num_threads(before)
    return most if several <= WORTH * single else 1


def _product(
    hidden: int, intermediate: int, dtype: torch.dtype, multiply: Multiply
) -> Callable[[], object]:
    """Of constants: nothing is drawn from a generator."""
    narrow, wide = min(hidden, WIDEST), min(intermediate, WIDEST)
    states = torch.full((ROWS, narrow), 0.5, dtype=dtype)
    weight = torch.full((wide, narrow), 0.25, dtype=dtype)
    return lambda: multiply(states, weight)


def _medians(works: list[Callable[[], object]], clock: Callable[[], float]) -> list[float]:
    """Median seconds of each, in alternating rounds after one that warms up."""
    for work in works:
        work()
    took: list[list[float]] = [[] for _ in works]
    began = time.perf_counter()
    for number in range(ROUNDS):
        if number >= LEAST and time.perf_counter() - began > MOST_SECONDS:
            break
        for work, seconds in zip(works, took, strict=True):
            start = clock()
            work()
            seconds.append(clock() - start)
    return [statistics.median(seconds) for seconds in took]
