"""Routers that compute in float32 in a model of a narrower dtype (model.router_dtype).

A product in bfloat16 rounds a router's logits to eight bits: experts that are nearly as good tie or
change places. Here the product of the hidden states with the router's weight is float32, from the
same numbers in the narrow dtype, and the type's own code goes on from there: logits, scores, the
choice and both losses of routers are float32. Shares are as that code has them: float32 where it
gives them the dtype of the logits, narrow where it gives them that of the hidden states.

The products are those of a router's `torch.nn.functional.linear`. Whatever watches a router
(models.routers) calls `route`.
"""

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.overrides import TorchFunctionMode

from postgrad.models.linear import NARROW

_WIDE = "computes_in_float32"  # the attribute of a router that does


def widen(routers: Iterable[nn.Module]) -> None:
    """From now on these routers compute in float32."""
    for router in routers:
        setattr(router, _WIDE, True)
        # No closure: a twin of the model (models/four_bits.py) is a deep copy.
        router.forward = partial(route, router)


def route(router: nn.Module, *args: Any, **named: Any) -> Any:
    """What a router's own forward gives, in float32 where `widen` says so."""
    forward = type(router).forward
    if not getattr(router, _WIDE, False):
        return forward(router, *args, **named)
    if _prepares(router):
        hidden, *rest = args
        args = hidden.to(torch.float32), *rest
    with _WideProducts():
        return forward(router, *args, **named)


def _prepares(router: Any) -> bool:
    """Whether a router does more to hidden states than one product: it norms them first (Gemma 4),
    or an adapter stands on its linear layer. Then all of that is float32.
    """
    adapted = any(hasattr(child, "get_base_layer") for child in router.children())
    return adapted or hasattr(router, "norm")


class _WideProducts(TorchFunctionMode):
    """Inside, linear products of narrow numbers are float32."""

    def __torch_function__(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        named = dict(kwargs or {})
        if func is not nn.functional.linear:
            return func(*args, **named)
        return _wide_product(*args, **named)


def _wide_product(input: Tensor, weight: Any, bias: Tensor | None = None) -> Tensor:
    """torch's `linear`, by its names. weight: also what stands for one with an adapter
    (models.adapter_mixtures).
    """
    if input.dtype not in NARROW and weight.dtype not in NARROW:
        return nn.functional.linear(input, weight, bias)
    if isinstance(weight, Tensor):
        return _WideProduct.apply(input, weight, bias)  # pyright: ignore[reportReturnType]
    wide_bias = None if bias is None else bias.float()
    return nn.functional.linear(input.float(), weight.float(), wide_bias)


class _WideProduct(torch.autograd.Function):
    """x W^T + b in float32. It saves x as it is, which the experts hold anyway, and makes it wide
    again in the backward pass; gradients have the dtypes of their tensors.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.of_bias = None if bias is None else bias.dtype
        return nn.functional.linear(
            x.float(), weight.float(), None if bias is None else bias.float()
        )

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,), (x, weight) = gradients, ctx.saved_tensors
        of_x = of_weight = of_bias = None
        if ctx.needs_input_grad[0]:
            of_x = (gradient @ weight.float()).to(x.dtype)
        rows = gradient.flatten(0, -2)
        if ctx.needs_input_grad[1]:
            of_weight = (rows.t() @ x.flatten(0, -2).float()).to(weight.dtype)
        if ctx.needs_input_grad[2]:
            of_bias = rows.sum(0).to(ctx.of_bias)
        return of_x, of_weight, of_bias
