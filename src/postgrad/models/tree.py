"""Attention over a tree of segments, for training and scoring: the learner's attention context,
block by block (`TreeAttention`) or in one kernel on a GPU (`FlexAttention`).
"""

from collections.abc import Iterable, Sequence
from functools import cache, cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

from postgrad.layout.blocks import Block, BlockPlan, block_table, plan_blocks
from postgrad.layout.layout import Layout
from postgrad.models.attention import AttentionContext, attend_folded, to_device

# Below 128 rows and without gradients torch would take its decoding kernel, which fails for more
# than 128 = rows * (query heads per key head): "No choices exist for backend".
ONE_KERNEL: dict[str, Any] = {"BACKEND": "TRITON"}
CHOSEN = (64, 128, 256)  # widths of heads that torch 2.11 has chosen blocks for, card by card
NARROWEST = 16  # width of a head: torch's kernel refuses less ("NYI: embedding dimension ...")
SQUARE = 128  # rows and keys of the squares that its kernel leaves out where nothing is visible
# Bytes of shared memory that torch's choice of blocks counts on from capability 8.0 on. Cards of
# 8.6, 8.9 and 12.0 have 99 KB; A100 and later ones of their kind at least 163 KB.
SHARED_MEMORY = 160 * 1024
# For such a card: fewer loads ahead of the products, and for wide heads narrower blocks backward.
TWO_STAGES: dict[str, Any] = {"fwd_num_stages": 2}
TWO_STAGES_EACH: dict[str, Any] = {"fwd_num_stages": 2, "bwd_num_stages": 2}
ONE_STAGE: dict[str, Any] = {"fwd_num_stages": 1}
NARROW_BLOCKS: dict[str, Any] = {"fwd_num_stages": 1, "fwd_BLOCK_M": 32, "fwd_BLOCK_N": 32}
SMALL_BLOCKS: dict[str, Any] = {
    "fwd_num_stages": 1, "bwd_num_stages": 1, "bwd_BLOCK_M1": 32, "bwd_BLOCK_N1": 64,
    "bwd_BLOCK_M2": 64, "bwd_BLOCK_N2": 32,
}  # fmt: skip
ALIGNED = 64  # int32 numbers: compiled kernels read tensors that begin at a multiple of 16 bytes


class _DeviceBlock:
    """One block on a device: its shape (runs, queries, keys) and the masks that were asked for."""

    def __init__(self, block: Block, device: torch.device) -> None:
        self.shape = block.query_rows.shape[0], block.query_rows.shape[1], block.key_rows.shape[1]
        self._query_positions = to_device(block.query_positions, device)[:, :, None]
        self._key_positions = to_device(block.key_positions, device)[:, None, :]
        seen = block.seen
        self._seen = None if seen is None else to_device(seen, device)[:, :, :, None]
        self._masks: dict[tuple[int | None, int, torch.dtype], Tensor] = {}

    def mask(self, window: int | None, groups: int, dtype: torch.dtype) -> Tensor:
        """[B, 1, G * Q, K] added to the scores: -inf at keys that a query does not see, else 0.

        Built once for all layers: from a bool mask every layer would build and keep such a one.
        """
        asked = window, groups, dtype
        if asked not in self._masks:
            first, last = self._seen if self._seen is not None else (None, self._query_positions)
            hidden = self._key_positions > last
            if window is not None:
                before = self._key_positions <= self._query_positions - window
                hidden |= before if first is None else before & (self._key_positions < first)
            mask = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device)
            mask.masked_fill_(hidden, float("-inf"))
            self._masks[asked] = mask.repeat(1, groups, 1)[:, None]
        return self._masks[asked]


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
        self._query_rows = to_device(np.concatenate(queries), device)
        self._key_rows = to_device(np.concatenate(keys), device)
        self._query_sizes = [len(rows) for rows in queries]
        self._key_sizes = [len(rows) for rows in keys]
        self._source_row = to_device(plan.source_row, device)

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
        if query.device.type == "cpu" and query.dtype in (torch.bfloat16, torch.float16):
            # torch's kernel takes up to half as long again in bfloat16 there, most of it backward.
            wide = (each.float() for each in (query, key, value))
            out = self.attend(
                layer, *wide, scale=scale, window=window, softcap=softcap, sinks=sinks
            )
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
                sinks=sinks,
            )
            by_row = out.unflatten(2, (groups, rows)).permute(0, 3, 1, 2, 4)
            outputs.append(by_row.reshape(count * rows, heads, value_dim))
        return torch.cat(outputs).index_select(0, self._source_row)


@cache
def _kernel() -> Any:
    """Compiled once for the process: compilation takes seconds, layouts come by the thousand."""
    from postgrad.models.compiled import settle  # torch's compiler takes seconds to import

    settle()
    return torch.compile(flex_attention, dynamic=True)


@cache
def _is_roomy(device: torch.device) -> bool:
    """Whether a device has as much shared memory as torch's choice of blocks needs."""
    if device.type != "cuda":
        return True
    return torch.cuda.get_device_properties(device).shared_memory_per_block_optin >= SHARED_MEMORY


def kernel_options(width: int, dtype: torch.dtype, roomy: bool) -> dict[str, Any]:
    """What flex attention is told for heads of `width` numbers: for a roomy card nothing about its
    blocks, but for wide heads that torch has no choice of its own for.
    """
    if roomy and width > 64 and width not in CHOSEN:
        if dtype == torch.float32:
            return ONE_KERNEL | (TWO_STAGES if width < 128 else ONE_STAGE)
        return ONE_KERNEL | (TWO_STAGES_EACH if width > 128 else {})
    if roomy or width == 64:
        return ONE_KERNEL
    if dtype == torch.float32:
        if width > 128 and width not in CHOSEN:
            return ONE_KERNEL | NARROW_BLOCKS
        return ONE_KERNEL | (ONE_STAGE if width > 64 else {})
    if width > 128:
        return ONE_KERNEL | SMALL_BLOCKS
    return ONE_KERNEL | (TWO_STAGES if width < 128 else {})


def _in_one_copy(arrays: Sequence[NDArray[np.int32]], device: torch.device) -> list[Tensor]:
    """Arrays as tensors on a device. The copy is one, from pinned memory, so that nothing waits."""
    starts = np.cumsum([0, *(-(-array.size // ALIGNED) * ALIGNED for array in arrays)]).tolist()
    host = torch.empty(starts[-1], dtype=torch.int32, pin_memory=device.type == "cuda")
    flat = host.numpy()
    for start, array in zip(starts, arrays, strict=False):
        flat[start : start + array.size] = array.ravel()
    packed = host.to(device, non_blocking=True)
    # set_, not slices: a compiled graph also guards what a view is a view of.
    return [
        torch.empty(0, dtype=torch.int32, device=device).set_(packed, start, array.shape)  # pyright: ignore[reportCallIssue, reportArgumentType]
        for start, array in zip(starts, arrays, strict=False)
    ]


def _two_squares(array: NDArray[np.int32]) -> NDArray[np.int32]:
    """A table of one square gets an empty one beside it: alone it would need a graph of its own."""
    return np.pad(array, [(0, 1)] * array.ndim) if len(array) == 1 else array


class FlexAttention:
    """The attention context of one layout. Rows lie in depth-first order, so the tree is two
    comparisons: q sees k when k <= q < subtree_end[k]. Heads that are narrower than the kernel can
    take are computed by TreeAttention.

    windows: those that layers will ask for. Another one is added when a layer asks, which a
    compiled layer cannot do.
    """

    def __init__(
        self, layout: Layout, device: torch.device, windows: Iterable[int | None] = (None,)
    ) -> None:
        self._layout = layout
        self._device = device
        self._roomy = _is_roomy(device)
        self._masks = self._built(tuple(windows))

    @cached_property
    def _narrow(self) -> TreeAttention:
        return TreeAttention(plan_blocks(self._layout), self._device)

    def _built(self, windows: Sequence[int | None]) -> dict[int | None, BlockMask]:
        layout, n = self._layout, self._layout.n_tokens
        arrays = [layout.positions.astype(np.int32), layout.subtree_end.astype(np.int32)]
        for window in windows:
            table = block_table(layout, window, SQUARE)
            arrays += [_two_squares(array)[None, None] for array in table.arrays]
        positions, ends, *tables = _in_one_copy(arrays, self._device)
        each = len(tables) // max(1, len(windows))
        return {
            window: BlockMask(
                (n, n),
                *tables[number * each : (number + 1) * each],
                BLOCK_SIZE=(SQUARE, SQUARE),
                mask_mod=_visible(positions, ends, window),
            )
            for number, window in enumerate(windows)
        }

    def _mask(self, window: int | None) -> BlockMask:
        if window not in self._masks:
            self._masks |= self._built((window,))
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
        sinks: Tensor | None = None,
    ) -> Tensor:
        width = max(query.shape[-1], value.shape[-1])
        if min(query.shape[-1], value.shape[-1]) < NARROWEST:
            return self._narrow.attend(
                layer, query, key, value, scale=scale, window=window, softcap=softcap, sinks=sinks
            )

        def cap(score: Tensor, *_: Tensor) -> Tensor:
            assert softcap is not None
            return softcap * torch.tanh(score / softcap)

        kernel: Any
        if torch.compiler.is_compiling():  # a part of the graph of a compiled layer
            kernel, query, key = flex_attention, _by_token(query, 2.0), _by_token(key, 0.5)
        else:
            kernel = _kernel()
        out: Any = kernel(
            query.view(1, *query.shape),
            key.view(1, *key.shape),
            value.view(1, *value.shape),
            score_mod=None if softcap is None else cap,
            block_mask=self._mask(window),
            scale=scale,
            enable_gqa=query.shape[0] != key.shape[0],
            kernel_options=kernel_options(width, query.dtype, self._roomy),
            **({} if sinks is None else {"return_aux": AuxRequest(lse=True)}),
        )
        if sinks is not None:  # their share of each softmax, from the log of its sum
            out, sums = out
            share = torch.sigmoid(sums.lse - sinks[:, None])
            out = out * share[..., None].to(out.dtype)
        return out.squeeze(0).transpose(0, 1)


def _by_token(heads: Tensor, factor: float) -> Tensor:
    """[H, T, D] times a power of two, which rounds nothing, with the heads of a token side by side.

    torch's compiler lays a result out by the dimensions of the operation that it comes from, and
    those of attention as its query. Without a factor it takes this for no operation, and copies
    attention's results for the product that reads them.
    """
    return (heads.transpose(0, 1) * factor).transpose(0, 1)


def _visible(positions: Tensor, ends: Tensor, window: int | None) -> Any:
    """torch's mask_mod for a layout's rows."""

    def sees(_batch: Tensor, _head: Tensor, q: Tensor, k: Tensor) -> Tensor:
        on_path = (k <= q) & (q < ends[k])
        if window is None:
            return on_path
        return on_path & (positions[k] > positions[q] - window)

    return sees


def attention_over(
    layout: Layout, device: torch.device, first: NDArray[np.int64] | None = None
) -> AttentionContext:
    """The fastest attention over a layout on a device. first: as of plan_blocks."""
    if device.type == "cuda" and layout.seen is None:  # its masks know no images seen whole
        return FlexAttention(layout, device)
    return TreeAttention(plan_blocks(layout, first), device)
