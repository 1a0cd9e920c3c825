"""Attention over a tree of segments, for training and scoring: the learner's attention context."""

import torch
from torch import Tensor

from postgrad.layout.blocks import Block, BlockPlan
from postgrad.models.attention import attend_padded


class _DeviceBlock:
    """One block's indices on a device, and its masks by the window that a layer has."""

    def __init__(self, block: Block, device: torch.device) -> None:
        self.shape = block.query_rows.shape[0], block.query_rows.shape[1], block.key_rows.shape[1]
        self.query_rows = torch.from_numpy(block.query_rows.ravel()).to(device)
        self.key_rows = torch.from_numpy(block.key_rows.ravel()).to(device)
        self._query_positions = torch.from_numpy(block.query_positions).to(device)[:, :, None]
        self._key_positions = torch.from_numpy(block.key_positions).to(device)[:, None, :]
        self._allowed: dict[int | None, Tensor] = {}

    def allowed(self, window: int | None) -> Tensor:
        """[B, 1, Q, K] which keys each query sees."""
        if window not in self._allowed:
            seen = self._key_positions <= self._query_positions
            if window is not None:
                seen = seen & (self._key_positions > self._query_positions - window)
            self._allowed[window] = seen[:, None]
        return self._allowed[window]


class TreeAttention:
    """Attention over the blocks of a layout with scaled_dot_product_attention.

    Works on every device with a backward pass; rows are gathered with index_select, whose backward
    is deterministic (indexing with repeated rows is not, on two CPU threads).
    """

    def __init__(self, plan: BlockPlan, device: torch.device) -> None:
        self._blocks = [_DeviceBlock(block, device) for block in plan.blocks]
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
        """AttentionContext.attend."""
        heads, _, dim = query.shape
        kv_heads, value_dim = value.shape[0], value.shape[2]
        outputs: list[Tensor] = []
        for block in self._blocks:
            count, rows, places = block.shape
            q = query.index_select(1, block.query_rows).view(heads, count, rows, dim)
            k = key.index_select(1, block.key_rows).view(kv_heads, count, places, dim)
            v = value.index_select(1, block.key_rows).view(kv_heads, count, places, value_dim)
            out = attend_padded(
                q.transpose(0, 1),
                k.transpose(0, 1),
                v.transpose(0, 1),
                block.allowed(window),
                scale=scale,
                softcap=softcap,
            )
            outputs.append(out.transpose(1, 2).reshape(count * rows, heads, value_dim))
        return torch.cat(outputs).index_select(0, self._source_row)
