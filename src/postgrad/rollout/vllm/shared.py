"""Weights in memory that other processes of this machine can read, and that has no name.

An anonymous file (memfd) is gone when the last process that holds it is: whatever kills a run,
nothing is left behind.
"""

import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch
from safetensors.torch import save
from torch import Tensor

from postgrad.core.pipes import write
from postgrad.rollout.weights import portions

BUCKET = 1 << 28  # bytes of weights that are shared at once, at least one weight


def buckets(
    weights: Iterable[tuple[str, Tensor]], dtype: torch.dtype, size: int = BUCKET
) -> Iterator[dict[str, Tensor]]:
    """Whole weights in `dtype` on the CPU, each copied, in portions of `size` bytes."""
    copied = (
        (name, weight.detach().to("cpu", dtype, copy=True).contiguous()) for name, weight in weights
    )
    return (dict(some) for some in portions(copied, size))


@contextmanager
def shared(bucket: Mapping[str, Tensor]) -> Iterator[str]:
    """The path under which processes of the same user read the bucket as safetensors."""
    with os.fdopen(os.memfd_create("postgrad-weights"), "wb", buffering=0) as file:
        write(file, save(dict(bucket)))
        yield f"/proc/{os.getpid()}/fd/{file.fileno()}"
