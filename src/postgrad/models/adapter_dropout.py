"""Dropout in front of an adapter's A, with masks from counters instead of a generator.

An input is zero where hash(seed, update, row key, layer, feature) falls under p; the others are
divided by 1 - p (Srivastava et al. 2014). A row's key is a hash of the tokens up to it
(layout/layout.py), so that a mask does not depend on how an update is packed, shared, ordered or
cut, is the same when checkpointed activations are computed again, and needs no state to resume.
"""

import zlib
from collections.abc import Generator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from postgrad.core import seeds
from postgrad.core.errors import UsageError
from postgrad.models.attention import to_device
from postgrad.models.row_hashes import LANES, STEPS, lanes_of, mixed, row_bits, signed


class RowMasks:
    """The masks that the dropout layers of one adapter share; rows: the hashed keys [T] of the rows
    of the current forward, None while dropout is off.
    """

    def __init__(self, seed: int, p: float) -> None:
        self.seed = seed
        # of STEPS, so p is a multiple of 2**-16
        self.dropped = min(round(p * STEPS), STEPS - 1)
        self.rows: Tensor | None = None

    @contextmanager
    def of(self, keys: Tensor, update: int) -> Generator[None]:
        """Dropout acts, with the masks of these rows [T] int64 in this update."""
        before = self.rows
        self.rows = mixed(keys ^ signed(int(seeds.bits(self.seed, "lora dropout", update))))
        try:
            yield
        finally:
            self.rows = before


class CounterDropout(nn.Module):
    """Takes the place of PEFT's nn.Dropout in front of one adapter of one layer."""

    features: Tensor

    def __init__(self, masks: RowMasks, layer: str, width: int, device: torch.device) -> None:
        super().__init__()
        self._masks = masks
        self._width = width
        number = zlib.crc32(layer.encode())
        hashes = seeds.bits(masks.seed, "lora dropout feature", number, lanes_of(width))
        self.register_buffer("features", to_device(hashes.view("i8"), device), persistent=False)

    def cut(self, part: int, parts: int) -> None:
        """From now on inputs are the `part`-th of `parts` equal slices of the layer's inputs.
        Raises UsageError where a slice would begin within a hash.
        """
        if self._width % (parts * LANES):
            raise UsageError(
                f"model.lora.dropout on a layer of {self._width} inputs that tensor_parallel cuts "
                f"in {parts}: its masks come {LANES} inputs at a time, so that each part has to be "
                f"a multiple of {LANES}; use dropout = 0"
            )
        self.features = self.features.chunk(parts)[part]

    @property
    def acts(self) -> bool:
        """Whether keys were given, so that inputs are dropped."""
        return self._masks.rows is not None

    def forward(self, x: Tensor) -> Tensor:
        """x: [..., T, inputs] for the T rows whose keys were given; unchanged where none were."""
        rows = self._masks.rows
        if rows is None:
            return x
        if x.shape[-2] != len(rows):
            raise ValueError(f"dropout keys name {len(rows)} rows, the forward has {x.shape[-2]}")
        keep = 1.0 - self._masks.dropped / STEPS
        return x.masked_fill(self._dropped(rows, x.shape[-1]), 0.0) * (1.0 / keep)

    def _dropped(self, rows: Tensor, width: int) -> Tensor:
        return row_bits(rows, self.features, width) < self._masks.dropped - STEPS // 2
