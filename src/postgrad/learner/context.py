"""A layout on the ranks of one replica: outside attention and MLP each rank has a run of its rows.

Ulysses (arXiv:2309.14509): attention runs unchanged, over all rows and a share of the heads. With
tensor parallelism (learner/tensor.py) a rank already has a share of the heads in attention, and the
rows of all ranks of its tensor group.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from postgrad.core.errors import UsageError
from postgrad.core.ragged import Ragged
from postgrad.core.records import SamplingMask
from postgrad.layout.layout import Layout
from postgrad.models.attention import AttentionContext, to_device
from postgrad.parallel.exchange import heads_from_rows, outputs_of_all, rows_from_heads
from postgrad.parallel.ranks import Ranks


@dataclass(frozen=True, slots=True)
class RankRows:
    """This rank's L rows of a layout that is padded for its ranks (Layout.padded), and the e loss
    entries that read them. One more entry, whose gradient is 0, makes every rank use the output
    head.
    """

    rows: range  # L rows of the layout
    inner: slice  # its tensor_parallel * L rows inside attention and MLP
    hidden_row: NDArray[np.int64]  # [e + 1] for each entry the index into `rows`
    entries: NDArray[np.int64]  # [e] indices of the layout's entries

    @classmethod
    def of(cls, layout: Layout, ranks: Ranks) -> "RankRows":
        """Rows in equal runs, in the order of ranks."""
        each, left = divmod(layout.n_tokens, ranks.grid.sharers)
        assert not left
        start, inside = ranks.sharer * each, ranks.grid.tensor * each
        first = ranks.context_rank * inside
        entries = np.flatnonzero((layout.hidden_row >= start) & (layout.hidden_row < start + each))
        hidden = np.append(layout.hidden_row[entries] - start, 0)
        return cls(range(start, start + each), slice(first, first + inside), hidden, entries)

    def part(self, by_row: NDArray[Any]) -> NDArray[Any]:
        """[L, ...] of an array [T, ...] over the layout's rows."""
        return by_row[self.rows.start : self.rows.stop]

    def inputs(self, layout: Layout) -> tuple[NDArray[np.int64], ...]:
        """Token ids [L], rotary positions [tensor_parallel * L] or [3, tensor_parallel * L] and
        hidden rows [e + 1] of this rank.
        """
        positions = layout.rotary_positions[..., self.inner]
        return self.part(layout.token_ids), positions, self.hidden_row

    def targets(self, layout: Layout) -> NDArray[np.int64]:
        """[e + 1] token ids that the entries predict; 0 for the extra entry."""
        return np.append(layout.target[self.entries], 0)

    def sampling_mask(self, layout: Layout) -> SamplingMask | None:
        """[e + 1] rows of the entries' masks, none of the extra entry; None without any."""
        if layout.sampling_mask is None:
            return None
        of_entries = layout.sampling_mask.take_many(self.entries)
        return Ragged.joined([of_entries, Ragged.empty(1, np.int32)], np.int32)

    def outputs(self, rank_outputs: Tensor, layout: Layout, ranks: Ranks) -> Tensor:
        """The outputs [E] or [E, k] of the whole layout, from this rank's [e + 1] or [e + 1, k] and
        those of the others.
        """
        if rank_outputs.ndim > 1:
            columns = rank_outputs.unbind(1)
            return torch.stack([self.outputs(column, layout, ranks) for column in columns], 1)
        places = to_device(self.entries, rank_outputs.device)
        entry_outputs = rank_outputs[:-1] + rank_outputs[-1] * 0.0
        return outputs_of_all(entry_outputs, places, len(layout.target), ranks.groups.replica)


class SharedAttention:
    """The attention of a layout on ranks that each have a run of its rows."""

    def __init__(self, inner: AttentionContext, ranks: Ranks) -> None:
        """ranks: of which several share rows (context_parallel)."""
        self._inner = inner
        self._size = ranks.grid.context
        self._rank = ranks.context_rank
        self._group: Any = ranks.groups.context

    def attend(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        scale: float,
        window: int | None,
        softcap: float | None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """AttentionContext.attend for this rank's rows alone."""
        key, value = (self._shared(each) for each in (key, value))
        query, key, value = (heads_from_rows(x, self._group) for x in (query, key, value))
        if sinks is not None:
            sinks = sinks.chunk(self._size)[self._rank]
        attended = self._inner.attend(
            layer, query, key, value, scale=scale, window=window, softcap=softcap, sinks=sinks
        )
        return rows_from_heads(attended.transpose(0, 1), self._group).transpose(0, 1)

    def _shared(self, x: Tensor) -> Tensor:
        """Repeats key heads where there are fewer of them than ranks: one copy for each rank."""
        times = max(1, self._size // len(x))
        return x.repeat_interleave(times, 0) if times > 1 else x


def require_heads(config: Any, size: int, tensor: int = 1) -> None:
    """Raises UsageError where the heads that tensor parallelism (`tensor` parts) leaves a rank
    cannot be divided over `size` ranks.
    """
    if size == 1:
        return
    heads, keys = config.num_attention_heads // tensor, config.num_key_value_heads // tensor
    if heads % size or (keys % size and size % keys):
        left = f" that tensor_parallel = {tensor} leaves each rank" if tensor > 1 else ""
        raise UsageError(
            f"learner.context_parallel = {size}: {heads} attention heads with {keys} key heads"
            f"{left} cannot be dealt to {size} ranks: it has to divide {heads}, and {keys} or be a "
            f"multiple of it"
        )
