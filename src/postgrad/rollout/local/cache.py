"""The key-value cache: prompts that several rows share, and one response for each row.

The samples of a prompt share one *stretch*, a run of token places: its keys are read once a step
for all of them (Hydragen, arXiv:2402.05099). Decoding is bound by how many bytes of keys and values
it reads, and most of them are the prompts'; docs/rollout.md has the numbers.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


@dataclass(frozen=True, slots=True)
class LayerShape:
    """What one layer stores for each token."""

    heads: int  # key heads
    key_dim: int  # values of a key, per head
    value_dim: int  # values of a value vector, per head


def bytes_per_token(shapes: tuple[LayerShape, ...], dtype: torch.dtype) -> int:
    """Bytes of one token's keys and values over all layers."""
    values = sum(shape.heads * (shape.key_dim + shape.value_dim) for shape in shapes)
    return values * dtype.itemsize


@dataclass(frozen=True, slots=True)
class Stretches:
    """Stretches of one kind, prompts or responses: views of the cache's allocation."""

    keys: tuple[Tensor, ...]  # for each layer [slots, KV, places, D]
    values: tuple[Tensor, ...]  # for each layer [slots, KV, places, Dv]
    places: int  # token places of each stretch
    place: NDArray[np.int64]  # [slots] where in the tensors the stretch of each number is

    def move(
        self, to: NDArray[np.int64], source: NDArray[np.int64], lengths: NDArray[np.int64]
    ) -> None:
        """The stretches `source` get the numbers `to`, which do not overlap. lengths: tokens of
        every stretch, indexed by the new numbers.

        On a CPU, where products read stretches that lie side by side, they are copied. On CUDA
        attention looks up where each is.
        """
        if not len(to):
            return
        if self.keys[0].device.type != "cpu":
            self.place[to], self.place[source] = self.place[source], self.place[to]
            return
        tokens = int(lengths[to].max())
        onto, of = (torch.from_numpy(a).to(self.keys[0].device) for a in (to, source))
        for store in (*self.keys, *self.values):
            store[onto, :, :tokens] = store[of, :, :tokens]


class KeyValueCache:
    """One allocation of `tokens` places a layer, divided into `prompts` and `responses`.

    Every place holds a finite number at all times: attention reads all stretches up to the longest,
    and masks the rest of shorter ones after it has read it.
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
        self._dtype = dtype
        self.device = device
        self.release()

    def release(self) -> None:
        """Free the allocation; `divide` makes it again."""
        self._keys: list[Tensor] = []
        self._values: list[Tensor] = []
        self.prompts = self.responses = Stretches((), (), 0, np.arange(0))
        self._scratch: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}

    def divide(self, slots: int, prompt: int, response: int) -> None:
        """Lay the allocation out for `slots` rows; its content is lost.

        prompt, response: places of each stretch. There are as many prompts as rows, since each row
        may have one of its own; where rows share, the pages of unused ones are never touched.
        Raises ValueError where the rows need more places than there are.
        """
        if slots * (prompt + response) > self.tokens:
            raise ValueError(
                f"{slots} slots of {prompt} + {response} places are over {self.tokens}"
            )
        if not self._keys:
            self._keys = [self._places(shape.heads * shape.key_dim) for shape in self._shapes]
            self._values = [self._places(shape.heads * shape.value_dim) for shape in self._shapes]
        self.prompts = self._stretches(0, slots, prompt)
        self.responses = self._stretches(slots * prompt, slots, response)

    def scratch(self, count: int, dim: int) -> tuple[Tensor, Tensor]:
        """Float32 [count, dim] and [count] for what a kernel leaves for the next one, the same each
        time: CUDA graphs have their addresses. They are zeros at first.
        """
        if (count, dim) not in self._scratch:
            wide = torch.zeros(count, dim, device=self.device)
            self._scratch[count, dim] = wide, torch.zeros(count, device=self.device)
        return self._scratch[count, dim]

    def _places(self, values: int) -> Tensor:
        """Zeros for all places, flat, `values` a token. On a CPU the array begins on a cache line,
        and takes a page of memory when it is first written.
        """
        count = self.tokens * values
        if self.device.type != "cpu":
            return torch.zeros(count, dtype=self._dtype, device=self.device)
        spare, size = 64, count * self._dtype.itemsize
        raw = torch.from_numpy(np.zeros(size + spare, np.uint8))
        start = -raw.data_ptr() % spare
        return raw[start : start + size].view(self._dtype)

    def _stretches(self, first: int, slots: int, places: int) -> Stretches:
        """Views of `slots` stretches, from place `first` of the allocation on."""

        def view(flat: Tensor, heads: int, dim: int) -> Tensor:
            start, size = first * heads * dim, slots * places * heads * dim
            return flat[start : start + size].view(slots, heads, places, dim)

        return Stretches(
            tuple(
                view(flat, s.heads, s.key_dim)
                for flat, s in zip(self._keys, self._shapes, strict=True)
            ),
            tuple(
                view(flat, s.heads, s.value_dim)
                for flat, s in zip(self._values, self._shapes, strict=True)
            ),
            places,
            np.arange(slots),
        )
