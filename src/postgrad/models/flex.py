"""Attention over a tree of segments through torch's flex attention: CUDA, one kernel, no padding.

`make test-gpu-stub` compiles it and runs none of it; on a GPU, tests/gpu holds it to TreeAttention.
"""

from functools import cache, cached_property
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from postgrad.layout.blocks import plan_blocks
from postgrad.layout.layout import Layout
from postgrad.models.tree import TreeAttention

# Below 128 rows and without gradients torch would take its decoding kernel, which fails for more
# than 128 = rows * (query heads per key head): "No choices exist for backend".
ONE_KERNEL = {"BACKEND": "TRITON"}
NARROWEST = 16  # width of a head: torch's kernel refuses less ("NYI: embedding dimension ...")


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
