"""Collectives between the ranks of one replica, with gradients.

Ulysses (arXiv:2309.14509): outside attention a rank has a run of the rows, inside it all rows of
some heads. Tensor parallelism (arXiv:1909.08053, arXiv:2205.05198): outside the matrices a rank has
a run of the rows, inside them all rows and some of the features. Every rank computes the same loss,
from the outputs of all. Expert parallelism (GShard, arXiv:2006.16668): a rank has rows of its own,
and in a mixture sends each to the ranks that have its experts. n: ranks of the group.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable


def heads_from_rows(x: Tensor, group: Any) -> Tensor:
    """All-to-all: this rank's L rows [H, L, D] -> all rows of this rank's heads [H / n, n L, D]."""
    return _Exchange.apply(x, group, True)  # pyright: ignore[reportReturnType]


def rows_from_heads(x: Tensor, group: Any) -> Tensor:
    """All-to-all: all rows of this rank's heads [H / n, n L, D] -> this rank's L rows [H, L, D]."""
    return _Exchange.apply(x, group, False)  # pyright: ignore[reportReturnType]


def rows_of_all(x: Tensor, group: Any) -> Tensor:
    """All-gather: this rank's L rows [1, L, H] -> all rows [1, n L, H]."""
    return _ReplicaRows.apply(x, group, True)  # pyright: ignore[reportReturnType]


def rows_from_sums(x: Tensor, group: Any) -> Tensor:
    """Reduce-scatter: each rank's summand [1, n L, H] -> the sums of this rank's rows [1, L, H]."""
    return _ReplicaRows.apply(x, group, False)  # pyright: ignore[reportReturnType]


def rows_of_experts(x: Tensor, sent: Sequence[int], received: Sequence[int], group: Any) -> Tensor:
    """All-to-all of any numbers of rows: this rank's rows [sum(sent), H], those for rank 0 first ->
    the rows for this rank [sum(received), H], those from rank 0 first. sent, received: rows to and
    from each rank [n]. Its backward pass brings the gradient of each row back where it came from.
    """
    return _Rows.apply(x, list(sent), list(received), group)  # pyright: ignore[reportReturnType]


def counts_of_all(counts: Tensor, group: Any) -> Tensor:
    """All-to-all: this rank's numbers for each rank [n, m] -> those for it, by sender [n, m]."""
    received = torch.empty_like(counts)
    dist.all_to_all_single(received, counts.contiguous(), group=group)
    return received


def outputs_of_all(outputs: Tensor, places: Tensor, count: int, group: Any) -> Tensor:
    """All outputs [count] from those of each rank, which lie at its `places` [len(outputs)]. A
    rank's gradient is that of its own outputs, not a sum: every rank computes the same loss.
    """
    return _Assemble.apply(outputs, places, count, group)  # pyright: ignore[reportReturnType]


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
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=group)
        heads, rows, dim = x.shape
        parts = received.view(size, heads // size, rows, dim)
        return parts.transpose(0, 1).reshape(heads // size, size * rows, dim)
    heads, rows, dim = x.shape
    sent = x.view(heads, size, rows // size, dim).transpose(0, 1).contiguous()
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    return received.view(size * heads, rows // size, dim)


class _Rows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, sent: list[int], received: list[int], group: Any) -> Tensor:
        ctx.splits, ctx.group = (sent, received), group
        return _exchange_rows(x, sent, received, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        sent, received = ctx.splits
        return _exchange_rows(gradients[0], received, sent, ctx.group), None, None, None


def _exchange_rows(x: Tensor, sent: list[int], received: list[int], group: Any) -> Tensor:
    rows = x.new_empty(sum(received), *x.shape[1:])
    dist.all_to_all_single(rows, x.contiguous(), received, sent, group=group)
    return rows


class _ReplicaRows(torch.autograd.Function):
    """All-gather and reduce-scatter of rows: the backward pass of each is the other."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any, gather: bool) -> Tensor:
        ctx.group, ctx.gather = group, gather
        return _gather(x, group) if gather else _scatter(x, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = gradients
        of_x = _scatter(gradient, ctx.group) if ctx.gather else _gather(gradient, ctx.group)
        return of_x, None, None


def _gather(x: Tensor, group: Any) -> Tensor:
    gathered = x.new_empty(1, x.shape[1] * dist.get_world_size(group), x.shape[2])
    dist.all_gather_into_tensor(gathered[0], x[0].contiguous(), group=group)
    return gathered


def _scatter(x: Tensor, group: Any) -> Tensor:
    """Reduce-scatter, added in float32 like all other sums over ranks."""
    shape = 1, x.shape[1] // dist.get_world_size(group), x.shape[2]
    summed = x.new_empty(shape, dtype=torch.float32)
    dist.reduce_scatter_tensor(summed[0], x[0].float().contiguous(), group=group)
    return summed.to(x.dtype)


class _Assemble(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, outputs: Tensor, places: Tensor, count: int, group: Any) -> Tensor:
        ctx.save_for_backward(places)
        assembled = outputs.new_zeros(count)
        assembled[places] = outputs.detach()
        dist.all_reduce(assembled, group=group)
        return assembled

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (places,) = ctx.saved_tensors
        return gradients[0].index_select(0, places), None, None, None
