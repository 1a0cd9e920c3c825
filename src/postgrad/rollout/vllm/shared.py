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

BUCKET = 1 << 28  # bytes of weights that are shared at once, at least one weight


def buckets(
    weights: Iterable[tuple[str, Tensor]], dtype: torch.dtype, size: int = BUCKET
) -> Iterator[dict[str, Tensor]]:
    """Whole weights in `dtype` on the CPU, each copied, together up to `size` bytes if they fit."""
    bucket: dict[str, Tensor] = {}
    held = 0
    for name, weight in weights:
        one = weight.detach().to("cpu", dtype, copy=True).contiguous()
        if bucket and held + one.nbytes > size:
            yield bucket
            bucket, held = {}, 0
        bucket[name] = one
        held += one.nbytes
    if bucket:
        yield bucket


@contextmanager
def shared(bucket: Mapping[str, Tensor]) -> Iterator[str]:
    """The path under which processes of the same user read the bucket as safetensors."""
    file = os.memfd_create("postgrad-weights")
    try:
        rest = memoryview(save(dict(bucket)))
        while rest:
            rest = rest[os.write(file, rest) :]
        yield f"/proc/{os.getpid()}/fd/{file}"
    finally:
        os.close(file)
