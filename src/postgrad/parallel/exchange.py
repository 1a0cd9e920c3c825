"""What ranks that share the sequences of one replica exchange, with gradients.

Ulysses (arXiv:2309.14509): outside attention a rank has a run of all rows, inside it all rows of
some heads. Losses are computed on every such rank alike, from the outputs of all.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable


def heads_from_rows(x: Tensor, group: Any) -> Tensor:
    """[H, L, D] of this rank's L rows -> [H / n, n * L, D] of all rows, the heads of this rank."""
    return _Exchange.apply(x, group, True)  # pyright: ignore[reportReturnType]


def rows_from_heads(x: Tensor, group: Any) -> Tensor:
    """[H / n, n * L, D] of all rows -> [H, L, D] of this rank's rows, of all heads."""
    return _Exchange.apply(x, group, False)  # pyright: ignore[reportReturnType]


def outputs_of_all(mine: Tensor, places: Tensor, count: int, group: Any) -> Tensor:
    """[count] outputs from each rank's own, [len(places)]. The gradient of what a rank gave comes
    back to it alone: every rank computes the same loss.
    """
    return _Assemble.apply(mine, places, count, group)  # pyright: ignore[reportReturnType]


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any, to_heads: bool) -> Tensor:
        ctx.group, ctx.to_heads = group, to_heads
        return _exchange(x, group, to_heads)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return _exchange(gradients[0], ctx.group, not ctx.to_heads), None, None


def _exchange(x: Tensor, group: Any, to_heads: bool) -> Tensor:
    size = dist.get_world_size(group)
    if to_heads:  # parts of heads go out, runs of rows come in
        sent = x.contiguous()
        found = torch.empty_like(sent)
        dist.all_to_all_single(found, sent, group=group)
        heads, rows, dim = x.shape
        parts = found.view(size, heads // size, rows, dim)
        return parts.transpose(0, 1).reshape(heads // size, size * rows, dim)
    heads, rows, dim = x.shape
    sent = x.view(heads, size, rows // size, dim).transpose(0, 1).contiguous()
    found = torch.empty_like(sent)
    dist.all_to_all_single(found, sent, group=group)
    return found.view(size * heads, rows // size, dim)


class _Assemble(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, mine: Tensor, places: Tensor, count: int, group: Any) -> Tensor:
        ctx.save_for_backward(places)
        found = mine.new_zeros(count)
        found[places] = mine.detach()
        dist.all_reduce(found, group=group)
        return found

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (places,) = ctx.saved_tensors
        return gradients[0].index_select(0, places), None, None, None
