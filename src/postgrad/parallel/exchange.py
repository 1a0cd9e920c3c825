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
from torch.library import custom_op

# torch 2.13 warns of the older names.
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def heads_from_rows(x: Tensor, group: Any) -> Tensor:
    """All-to-all: this rank's L rows [H, L, D] -> all rows of this rank's heads [H / n, n L, D]."""
    return _heads_from_rows(x, group.group_name)


def rows_from_heads(x: Tensor, group: Any) -> Tensor:
    """All-to-all: all rows of this rank's heads [H / n, n L, D] -> this rank's L rows [H, L, D]."""
    return _rows_from_heads(x, group.group_name)


def rows_of_all(x: Tensor, group: Any) -> Tensor:
    """All-gather: this rank's L rows [1, L, H] -> all rows [1, n L, H]."""
    return _rows_of_all(x, group.group_name)


def rows_from_sums(x: Tensor, group: Any) -> Tensor:
    """Reduce-scatter: each rank's summand [1, n L, H] -> the sums of this rank's rows [1, L, H],
    added in float32 like all other sums over ranks.
    """
    return _rows_from_sums(x, group.group_name)


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


# Operators of their own, which torch's compiler puts into the graph of a layer as they are
# (models/compiled.py). The backward pass of each is another one. group: its name.


@custom_op("postgrad::heads_from_rows", mutates_args=())
def _heads_from_rows(x: Tensor, group: str) -> Tensor:
    size, (heads, rows, dim) = _size(group), x.shape
    received = _all_to_all(x.contiguous(), group)  # parts of heads go out, runs of rows come in
    parts = received.view(size, heads // size, rows, dim)
    return parts.transpose(0, 1).reshape(heads // size, size * rows, dim)


@_heads_from_rows.register_fake
def _(x: Tensor, group: str) -> Tensor:
    size, (heads, rows, dim) = _size(group), x.shape
    return x.new_empty(heads // size, size * rows, dim)


@custom_op("postgrad::rows_from_heads", mutates_args=())
def _rows_from_heads(x: Tensor, group: str) -> Tensor:
    size, (heads, rows, dim) = _size(group), x.shape
    sent = x.reshape(heads, size, rows // size, dim).transpose(0, 1).contiguous()
    return _all_to_all(sent, group).view(size * heads, rows // size, dim)


@_rows_from_heads.register_fake
def _(x: Tensor, group: str) -> Tensor:
    size, (heads, rows, dim) = _size(group), x.shape
    return x.new_empty(size * heads, rows // size, dim)


@custom_op("postgrad::rows_of_all", mutates_args=())
def _rows_of_all(x: Tensor, group: str) -> Tensor:
    gathered = x.new_empty(1, x.shape[1] * _size(group), x.shape[2])
    _all_gather(gathered[0], x[0].contiguous(), group=_group(group))
    return gathered


@_rows_of_all.register_fake
def _(x: Tensor, group: str) -> Tensor:
    return x.new_empty(1, x.shape[1] * _size(group), x.shape[2])


@custom_op("postgrad::rows_from_sums", mutates_args=())
def _rows_from_sums(x: Tensor, group: str) -> Tensor:
    summed = x.new_empty(1, x.shape[1] // _size(group), x.shape[2], dtype=torch.float32)
    sent = x[0].float().contiguous()
    _reduce_scatter(summed[0], sent, group=_group(group))
    return summed.to(x.dtype)


@_rows_from_sums.register_fake
def _(x: Tensor, group: str) -> Tensor:
    return x.new_empty(1, x.shape[1] // _size(group), x.shape[2])


def _group(name: str) -> Any:
    registry: Any = dist.distributed_c10d
    return registry._resolve_process_group(name)


def _size(group: str) -> int:
    return dist.get_world_size(_group(group))


def _all_to_all(sent: Tensor, group: str) -> Tensor:
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=_group(group))
    return received


def _keep_group(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.group = inputs[1]


def _pair(forward: Any, backward: Any) -> None:
    """Makes two operators the backward pass of each other."""
    for operator, other in ((forward, backward), (backward, forward)):
        operator.register_autograd(
            lambda ctx, gradient, other=other: (other(gradient, ctx.group), None),
            setup_context=_keep_group,
        )


_pair(_heads_from_rows, _rows_from_heads)
_pair(_rows_of_all, _rows_from_sums)


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
