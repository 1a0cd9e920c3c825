"""Attention over a tree of segments, for training and scoring: the learner's attention context,
block by block (`TreeAttention`) or in one kernel on a GPU (`FlexAttention`).
"""

from functools import cache, cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from postgrad.layout.blocks import Block, BlockPlan, plan_blocks
from postgrad.layout.layout import Layout
from postgrad.models.attention import attend_folded

# Below 128 rows and without gradients torch would take its decoding kernel, which fails for more
# than 128 = rows * (query heads per key head): "No choices exist for backend".
ONE_KERNEL = {"BACKEND": "TRITON"}
NARROWEST = 16  # width of a head: torch's kernel refuses less ("NYI: embedding dimension ...")


class _DeviceBlock:
    """One block on a device: its shape (runs, queries, keys) and a mask for each window size."""

    def __init__(self, block: Block, device: torch.device) -> None:
        self.shape = block.query_rows.shape[0], block.query_rows.shape[1], block.key_rows.shape[1]
        self._query_positions = torch.from_numpy(block.query_positions).to(device)[:, :, None]
        self._key_positions = torch.from_numpy(block.key_positions).to(device)[:, None, :]
        self._masks: dict[int | None, Tensor] = {}

    def mask(self, window: int | None, groups: int, dtype: torch.dtype) -> Tensor:
        """[B, 1, G * Q, K] added to the scores: -inf at keys that a query does not see, else 0.

        Built once for all layers: from a bool mask every layer would build and keep such a one.
        """
        if window not in self._masks:
            hidden = self._key_positions > self._query_positions
            if window is not None:
                hidden |= self._key_positions <= self._query_positions - window
            mask = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device)
            mask.masked_fill_(hidden, float("-inf"))
            self._masks[window] = mask.repeat(1, groups, 1)[:, None]
        return self._masks[window]


class TreeAttention:
    """Attention over the blocks of a layout with scaled_dot_product_attention.

    Works on every device, with gradients. Rows are gathered with index_select, whose backward is
    deterministic (that of indexing with repeated rows is not, on two CPU threads). One gather
    serves all blocks, because the backward of each gather clears and adds a gradient of all rows.
    """

    def __init__(self, plan: BlockPlan, device: torch.device) -> None:
        self._blocks = [_DeviceBlock(block, device) for block in plan.blocks]
        queries = [block.query_rows.ravel() for block in plan.blocks]
        keys = [block.key_rows.ravel() for block in plan.blocks]
        self._query_rows = torch.from_numpy(np.concatenate(queries)).to(device)
        self._key_rows = torch.from_numpy(np.concatenate(keys)).to(device)
        self._query_sizes = [len(rows) for rows in queries]
        self._key_sizes = [len(rows) for rows in keys]
        self._source_row = torch.from_numpy(plan.source_row).to(device)

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
    ) -> Tensor:
        if query.device.type == "cpu" and query.dtype == torch.bfloat16:
            # torch's kernel takes up to half as long again in bfloat16 there, most of it backward.
            wide = (each.float() for each in (query, key, value))
            out = self.attend(layer, *wide, scale=scale, window=window, softcap=softcap)
            return out.to(query.dtype)
        heads, _, dim = query.shape
        kv_heads, value_dim = value.shape[0], value.shape[2]
        groups = heads // kv_heads
        # By rows, as projections write them: a gather of whole rows reads them where they lie.
        queries = query.transpose(0, 1).index_select(0, self._query_rows).split(self._query_sizes)
        keys, values = (
            each.transpose(0, 1).index_select(0, self._key_rows).split(self._key_sizes)
            for each in (key, value)
        )
        outputs: list[Tensor] = []
        for block, q, k, v in zip(self._blocks, queries, keys, values, strict=True):
            count, rows, places = block.shape
            out = attend_folded(
                q.view(count, rows, kv_heads, groups, dim)
                .permute(0, 2, 3, 1, 4)
                .reshape(count, kv_heads, groups * rows, dim),
                k.view(count, places, kv_heads, dim).transpose(1, 2),
                v.view(count, places, kv_heads, value_dim).transpose(1, 2),
                block.mask(window, groups, query.dtype),
                scale=scale,
                softcap=softcap,
            )
            by_row = out.unflatten(2, (groups, rows)).permute(0, 3, 1, 2, 4)
            outputs.append(by_row.reshape(count * rows, heads, value_dim))
        return torch.cat(outputs).index_select(0, self._source_row)


@cache
def _kernel() -> Any:
    """Compiled once for the process: compilation takes seconds, layouts come by the thousand."""
    return torch.compile(flex_attention, dynamic=True)


class FlexAttention:
    """The attention context of one layout. Rows lie in depth-first order, so the tree is two
    comparisons: q sees k when k <= q < subtree_end[k]. Heads that are narrower than the kernel can
    take are computed by TreeAttention.
    """

    def __init__(self, layout: Layout, device: torch.device) -> None:
        self._layout = layout
        self._positions = torch.from_numpy(layout.positions).to(device)
        self._subtree_end = torch.from_numpy(layout.subtree_end).to(device)
        self._masks: dict[int | None, BlockMask] = {}

    @cached_property
    def _narrow(self) -> TreeAttention:
        return TreeAttention(plan_blocks(self._layout), self._positions.device)

    def _mask(self, window: int | None) -> BlockMask:
        if window not in self._masks:
            positions, subtree_end = self._positions, self._subtree_end

            def sees(_batch: Tensor, _head: Tensor, q: Tensor, k: Tensor) -> Tensor:
                on_path = (k <= q) & (q < subtree_end[k])
                if window is None:
                    return on_path
                return on_path & (positions[k] > positions[q] - window)

            n = len(positions)
            self._masks[window] = create_block_mask(
                sees, None, None, n, n, device=str(positions.device)
            )
        return self._masks[window]

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
    ) -> Tensor:
        if min(query.shape[-1], value.shape[-1]) < NARROWEST:
            return self._narrow.attend(
                layer, query, key, value, scale=scale, window=window, softcap=softcap
            )

        def cap(score: Tensor, *_: Tensor) -> Tensor:
            assert softcap is not None
            return softcap * torch.tanh(score / softcap)

        out = _kernel()(
            query[None],
            key[None],
            value[None],
            score_mod=None if softcap is None else cap,
            block_mask=self._mask(window),
            scale=scale,
            enable_gqa=query.shape[0] != key.shape[0],
            kernel_options=ONE_KERNEL,
        )
        return out[0].transpose(0, 1)
