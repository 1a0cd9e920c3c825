"""One process that rounds as two ranks with tensor parallelism do: each matrix of attention and MLP
in two halves, whose products are rounded before they are added, in float32.
"""

from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from postgrad.parallel.sharding import BY_INPUTS, BY_OUTPUTS


class _Twice(torch.autograd.Function):
    """[.., H] -> [.., 2 H]: one for each half, whose gradients are added in float32."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return torch.cat([x, x], -1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        first_half, second_half = gradients[0].chunk(2, -1)
        return (first_half.float() + second_half.float()).to(first_half.dtype)


def in_halves(lm: Any) -> None:
    """Makes the model's blocks compute so."""
    for layer in lm.get_decoder().layers:
        for block in (layer.self_attn, layer.mlp):
            block.register_forward_pre_hook(_doubled, with_kwargs=True)
            for name, module in block.named_modules():
                if name in BY_OUTPUTS + BY_INPUTS:
                    how = _by_outputs if name in BY_OUTPUTS else _by_inputs
                    module.forward = MethodType(how, module)  # type: ignore[method-assign]


def _doubled(
    _: nn.Module, args: tuple[Any, ...], named: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if args:
        return (_Twice.apply(args[0]), *args[1:]), named
    return args, {**named, "hidden_states": _Twice.apply(named["hidden_states"])}


def _by_outputs(self: nn.Linear, x: Tensor) -> Tensor:
    pairs = zip(x.chunk(2, -1), self.weight.chunk(2), strict=True)
    return torch.cat([nn.functional.linear(*pair) for pair in pairs], -1)


def _by_inputs(self: nn.Linear, x: Tensor) -> Tensor:
    pairs = zip(x.chunk(2, -1), self.weight.chunk(2, 1), strict=True)
    first_half, second_half = (nn.functional.linear(*pair).float() for pair in pairs)
    return (first_half + second_half).to(x.dtype)
