"""Root-mean-square norms (arXiv:1910.07467) in training, on CPUs.

In transformers' modules every power, mean and product is a step of autograd that keeps a copy of
its rows. One autograd function with its own backward pass keeps the rows and one number per row,
and takes a tenth to a half of the time.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from postgrad.models.settings import LLAMA_TYPES


class _FusedNorm(torch.autograd.Function):
    """weight * x / sqrt(mean(x^2) + epsilon), computed in float32 and rounded before the weight."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        wide = rows.float()
        scale = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
        scale = scale.square_().div_(rows.shape[-1]).add_(epsilon).rsqrt_()
        ctx.save_for_backward(rows, weight, scale)
        return (wide * scale).to(rows.dtype) * weight

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        rows, weight, scale = ctx.saved_tensors
        wide, gradient, wide_weight = rows.float(), gradients[0].float(), weight.float()
        width = rows.shape[-1]
        products = gradient * wide
        of_weight = None
        if ctx.needs_input_grad[1]:
            of_weight = (products.reshape(-1, width).t() @ scale.reshape(-1)).to(weight.dtype)
        along = (products @ wide_weight)[..., None].mul_(scale.pow(3)).div_(-width)
        of_rows = torch.mul(gradient, wide_weight, out=products).mul_(scale).addcmul_(wide, along)
        return of_rows.to(rows.dtype), of_weight, None


class FusedRMSNorm(nn.Module):
    """Takes the place of a norm of LLAMA_TYPES, with its `weight` [H] and `variance_epsilon`. Not
    for Gemma's norms, which add 1 to their weight.
    """

    weight: nn.Parameter
    variance_epsilon: float

    def forward(self, hidden_states: Tensor) -> Tensor:
        """[..., H] -> [..., H]."""
        return _FusedNorm.apply(hidden_states, self.weight, self.variance_epsilon)  # pyright: ignore[reportReturnType]


def fuse_norms(lm: Any, device: torch.device) -> None:
    """Turns the norms of a model of LLAMA_TYPES into FusedRMSNorm, on a CPU. Parameters, their
    names and outputs stay the same, the outputs up to rounding.
    """
    if device.type == "cpu" and lm.config.model_type in LLAMA_TYPES:
        for module in lm.modules():
            kind = type(module)
            plain = kind.__module__.startswith("transformers.models.")
            if plain and kind.__name__.endswith("RMSNorm"):
                module.__class__ = FusedRMSNorm
