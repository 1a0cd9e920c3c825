"""Weights in anonymous memory that other processes of this machine can read.

An anonymous file (memfd) is freed when the last process that holds it ends, so a killed run leaves
nothing behind.
"""

import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch
from safetensors.torch import save
from torch import Tensor

from postgrad.core.pipes import write
from postgrad.rollout.weights import portions

BUCKET = 1 << 28  # bytes of weights that are shared at once; at least one weight


def buckets(
    weights: Iterable[tuple[str, Tensor]], dtype: torch.dtype, size: int = BUCKET
) -> Iterator[dict[str, Tensor]]:
    """Weights by name in dicts of up to `size` bytes, each a copy in `dtype` on the CPU."""
    copied = (
        (name, weight.detach().to("cpu", dtype, copy=True).contiguous()) for name, weight in weights
    )
    return (dict(portion) for portion in portions(copied, size))


@contextmanager
def shared(bucket: Mapping[str, Tensor]) -> Iterator[str]:
    """Within it, a path at which processes of the same user read the bucket as safetensors."""
    with os.fdopen(os.memfd_create("postgrad-weights"), "wb", buffering=0) as file:
        write(file, save(dict(bucket)))
        yield f"/proc/{os.getpid()}/fd/{file.fileno()}"
