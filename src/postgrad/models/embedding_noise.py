"""Noise on a model's embeddings while it trains (NEFTune, Jain et al. 2023, arXiv:2310.05914).

Uniform within +-alpha / sqrt(L * d), in each of the d numbers of a token's embedding, for a
sequence of L tokens: its norm is about alpha / sqrt(3) whatever the length. The numbers are hashes
of (seed, update, sequence, position, feature): they do not depend on how an update is packed, cut
or divided over ranks, and need no state to resume.
"""

import math
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from postgrad.core import seeds
from postgrad.core.ragged import Ragged
from postgrad.layout.layout import Layout
from postgrad.models.attention import to_device
from postgrad.models.row_hashes import STEPS, lanes_of, row_bits


class EmbeddingNoise:
    """The noise of one model, whose embeddings stay as they are outside `of_update`.

    Nothing is added to the features of images, which take the place of embeddings later.
    """

    def __init__(self, lm: Any, alpha: float, seed: int) -> None:
        self._alpha, self._seed = alpha, seed
        # keys and bounds times sqrt(d) of a batch's tokens, and of the rows of a forward
        self._batch: tuple[NDArray[np.int64], NDArray[np.float64]] | None = None
        self._rows: tuple[NDArray[np.int64], NDArray[np.float64]] | None = None
        lm.get_input_embeddings().register_forward_hook(self._add)

    @contextmanager
    def of_update(self, tokens: Ragged, update: int) -> Generator[None]:
        """Noise acts in forwards over layouts of this batch. tokens: of its sequences, which share
        no rows; update: the number of the update.
        """
        sequence = tokens.rows
        position = np.arange(len(sequence)) - tokens.offsets[sequence]
        keys = seeds.bits(self._seed, "embedding noise", update, sequence, position)
        bounds = self._alpha / np.sqrt(tokens.lengths[sequence])
        self._batch = keys.view(np.int64), bounds
        try:
            yield
        finally:
            self._batch = None

    @contextmanager
    def over(self, layout: Layout, rows: range | None) -> Generator[None]:
        """Inside is a forward over a layout, or over these rows of it. Rows of no sequence, as in a
        layout that layers are compiled with, get no noise.
        """
        before, self._rows = self._rows, None
        if self._batch is not None and layout.flat is not None:
            part = slice(None) if rows is None else slice(rows.start, rows.stop)
            flat, (keys, bounds) = layout.flat[part], self._batch
            self._rows = keys[flat], bounds[flat] * (layout.copies[part] > 0)
        try:
            yield
        finally:
            self._rows = before

    def _add(self, _: Any, __: Any, embedded: Tensor) -> Tensor:
        """embedded: [1, T, d] or [T, d]."""
        if self._rows is None:
            return embedded
        keys, bounds = self._rows
        device, width = embedded.device, embedded.shape[-1]
        hashes = seeds.bits(self._seed, "embedding noise feature", lanes_of(width))
        lanes = to_device(hashes.view(np.int64), device)
        bits = row_bits(to_device(keys, device), lanes, width)
        # the middles of STEPS equal parts of [-1, 1], whose mean is exactly 0
        step = (bounds / (math.sqrt(width) * STEPS / 2)).astype(np.float32)
        noise = (bits.float() + 0.5) * to_device(step, device)[:, None]
        return (embedded + noise).to(embedded.dtype)
