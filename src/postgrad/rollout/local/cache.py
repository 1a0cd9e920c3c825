"""The key-value cache: one stretch of token places for each sequence that is being decoded.

A sample's stretch holds its prompt and its response, so that one product scores both. The prompt is
computed once for its n samples and its keys are copied to each: measured against attention that
reads one shared copy (arXiv:2402.05099), the copy costs less than a decode step and saves a second
product, a merge of two softmaxes and the bookkeeping of who shares what; docs/rollout.md has the
numbers.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

ALIGN = 16  # places: keeps every stretch on a cache line, so that bits do not depend on the row


@dataclass(frozen=True, slots=True)
class LayerShape:
    """What one layer stores per token: heads, and the sizes of a key and a value."""

    heads: int
    key_dim: int
    value_dim: int


def bytes_per_token(shapes: tuple[LayerShape, ...], dtype: torch.dtype) -> int:
    """Cache bytes of one token place over all layers."""
    values = sum(shape.heads * (shape.key_dim + shape.value_dim) for shape in shapes)
    return values * dtype.itemsize


def align(tokens: int) -> int:
    """`tokens` rounded up to whole cache lines."""
    return -(-tokens // ALIGN) * ALIGN


def _places(count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """`count` zeros. On a CPU the pages are only taken when they are first written."""
    if device.type != "cpu":
        return torch.zeros(count, dtype=dtype, device=device)
    spare = 64
    raw = torch.from_numpy(np.zeros(count * dtype.itemsize + spare, np.uint8))
    start = -raw.data_ptr() % spare
    return raw[start : start + count * dtype.itemsize].view(dtype)


class KeyValueCache:
    """keys[layer]: [slots, KV, places, D] views of one allocation of `tokens` places a layer.

    Every place holds a finite number at all times: attention reads up to the longest row, and what
    a shorter row has there is masked, not skipped.
    """

    def __init__(
        self,
        shapes: tuple[LayerShape, ...],
        tokens: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.tokens = tokens
        self._shapes = shapes
        self._keys = [_places(tokens * s.heads * s.key_dim, dtype, device) for s in shapes]
        self._values = [_places(tokens * s.heads * s.value_dim, dtype, device) for s in shapes]
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []
        self.places = 0

    def divide(self, slots: int, places: int) -> None:
        """Lay the allocation out as `slots` stretches of `places`; what it held is gone."""
        if slots * places > self.tokens:
            raise ValueError(f"{slots} slots of {places} places are over {self.tokens}")
        self.places = places
        self.keys = [
            flat[: slots * s.heads * places * s.key_dim].view(slots, s.heads, places, s.key_dim)
            for flat, s in zip(self._keys, self._shapes, strict=True)
        ]
        self.values = [
            flat[: slots * s.heads * places * s.value_dim].view(slots, s.heads, places, s.value_dim)
            for flat, s in zip(self._values, self._shapes, strict=True)
        ]

    def move(self, to: Tensor, source: Tensor, tokens: int) -> None:
        """Copy the first `tokens` places of rows `source` to rows `to`; the two do not overlap."""
        for store in (*self.keys, *self.values):
            store[to, :, :tokens] = store[source, :, :tokens]
