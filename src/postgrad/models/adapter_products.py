"""Products with A and B of adapters, which are float32 and are rounded to the dtype of the input.

Where layers are compiled, those that read the same input are one function (`changed_products`): it
is for a GPU, which waits for the memory and the launch of such narrow products, and not for their
arithmetic.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from postgrad.models.linear import MatrixGradient, multiply

# torch.addmm: within a graph torch's compiler copies what it adds to, or holds both products.
_LIBRARY = torch.library.Library("postgrad", "DEF")
_LIBRARY.define(
    "add_product(Tensor(a!) total, Tensor rows, Tensor matrix) -> ()",
    tags=(torch.Tag.pt2_compliant_tag,),
)


def _add_product(total: Tensor, rows: Tensor, matrix: Tensor) -> None:
    total.addmm_(rows, matrix)


@torch.library.register_fake("postgrad::add_product", lib=_LIBRARY)
def _returns_nothing(total: Tensor, rows: Tensor, matrix: Tensor) -> None:
    """What torch's compiler has to know of `add_product`."""


_LIBRARY.impl("add_product", _add_product, "CompositeExplicitAutograd")


def narrow_products(x: Tensor, weights: Sequence[Tensor]) -> Tensor:
    """The products of x [..., in] with weights [out, in] side by side, [..., all out], with
    gradients. Weights of a wider dtype are rounded to that of x; their gradients are not.
    """
    if x.dtype == weights[0].dtype or not x.numel():
        return multiply(x, _stacked(weights).to(x.dtype))
    products: Any = _RoundedProduct.apply(x.reshape(-1, x.shape[-1]), *weights)
    return products.view(*x.shape[:-1], products.shape[-1])


def _stacked(weights: Sequence[Tensor]) -> Tensor:
    return weights[0] if len(weights) == 1 else torch.cat(list(weights))


class _RoundedProduct(torch.autograd.Function):
    """Saves the weights as they are, and rounds them again in the backward pass."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, *weights: Tensor) -> Tensor:
        ctx.save_for_backward(rows, *weights)
        return nn.functional.linear(rows, _stacked(weights).to(rows.dtype))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        rows, *weights = ctx.saved_tensors
        (gradient,), wide = gradients, _stacked(weights).detach()
        of_rows = gradient @ wide.to(rows.dtype) if ctx.needs_input_grad[0] else None
        if not any(ctx.needs_input_grad[1:]):
            return of_rows, *(None for _ in weights)
        of_weights = _outer(wide, gradient, rows)
        return of_rows, *of_weights.split([len(weight) for weight in weights])


def changed_products(
    x: Tensor,
    base: tuple[Tensor, Tensor | None],
    scales: Sequence[float],
    all_a: Sequence[Tensor],
    all_b: Sequence[Tensor],
) -> Tensor:
    """x W^T + bias + scale x A^T B^T of layers that read the same x [..., in], side by side, [...,
    all out], with gradients of x, A and B. base: their frozen W [all out, in] and bias [all out];
    scales: of each; all_a: the A [rank, in] of each; all_b: the B [out, rank] of each, whose rank
    is 0 where a layer has no adapter.
    """
    rows = x.reshape(-1, x.shape[-1])
    products: Any = _ChangedProducts.apply(rows, *base, *scales, *all_a, *all_b)
    return products.view(*x.shape[:-1], products.shape[-1])


class _ChangedProducts(torch.autograd.Function):
    """One product with all A, and one with all B, which lie along the diagonal of a matrix of
    zeros; it adds to the product with W where that lies. So the forward pass takes three products
    whatever the number of layers, the backward pass five, and there is no array of the size of the
    result beside it. `each` is the scales, then the A and the B of all layers: torch's compiler
    loses an argument that is a tuple.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, bias: Tensor | None, *each: Any) -> Tensor:
        layers = len(each) // 3
        scales, factors = each[:layers], each[layers:]
        a, b = _narrow(factors, [*scales, *[1.0] * layers], rows.dtype)
        low = rows @ a.t()
        ctx.save_for_backward(rows, low, weight, *factors)
        ctx.scales = scales
        return _with_product(nn.functional.linear(rows, weight, bias), low, b.t())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        rows, low, weight, *factors = ctx.saved_tensors
        (gradient,) = gradients
        half = len(factors) // 2
        a, b = _narrow(factors, [*[1.0] * half, *ctx.scales], rows.dtype)
        of_low = gradient @ b
        of_rows = None
        if ctx.needs_input_grad[0]:
            of_rows = _with_product(gradient @ weight, of_low, a)
        if not any(ctx.needs_input_grad[3 + half :]):
            return of_rows, *[None] * (2 + half + len(factors))
        ranks, heights = [len(a) for a in factors[:half]], [len(b) for b in factors[half:]]
        of_a = _outer(factors[0], of_low, rows).split(ranks)
        of_b = _outer(factors[0], gradient, low).split(heights)
        blocks = [part.split(ranks, 1)[place].contiguous() for place, part in enumerate(of_b)]
        return of_rows, *[None] * (2 + half), *of_a, *blocks


def _narrow(
    factors: Sequence[Tensor], scales: Sequence[float], dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """A [all ranks, in] and B [all out, all ranks] in a dtype. factors: the A of all layers, then
    their B; scales: what each is multiplied by. Both lie in one array: torch's compiler writes at
    most eight at once, and so those of a whole layer.
    """
    half = len(factors) // 2
    all_a, all_b = factors[:half], factors[half:]
    ranks = [len(a) for a in all_a]
    rows = [
        nn.functional.pad(b, (sum(ranks[:place]), sum(ranks[place + 1 :])))
        for place, b in enumerate(all_b)
    ]
    scaled = [scale * factor for scale, factor in zip(scales, [*all_a, *rows], strict=True)]
    flat = torch.cat([factor.to(dtype).flatten() for factor in scaled])
    split = sum(ranks) * all_a[0].shape[1]
    return flat[:split].view(sum(ranks), -1), flat[split:].view(-1, sum(ranks))


def _with_product(total: Tensor, rows: Tensor, matrix: Tensor) -> Tensor:
    """total + rows @ matrix, where total lies."""
    torch.ops.postgrad.add_product(total, rows, matrix)
    return total


def _outer(weight: Tensor, gradient: Tensor, rows: Tensor) -> Tensor:
    """gradient.T @ rows in the dtype of a weight."""
    of_weight = MatrixGradient(weight.detach())
    of_weight.add(gradient, rows)
    total = of_weight.rest()
    assert total is not None
    return total
