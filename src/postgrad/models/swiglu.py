"""The gated feed-forward of LLAMA_TYPES (SwiGLU, arXiv:2002.05202) in training."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional


class _SwiGLU(torch.autograd.Function):
    """silu(gate) * up. These two are kept; silu(gate) is made again in the backward pass."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return functional.silu(gate).mul_(up)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        (gradient,) = gradients
        of_up = functional.silu(gate).mul_(gradient)
        of_silu = gradient * up
        return torch.ops.aten.silu_backward.grad_input(of_silu, gate, grad_input=of_silu), of_up


class FusedMLP(nn.Module):
    """What a feed-forward of LLAMA_TYPES becomes: its projections stay."""

    def forward(self, x: Tensor) -> Tensor:
        """[..., hidden] -> [..., hidden]."""
        own: Any = self
        return own.down_proj(_SwiGLU.apply(own.gate_proj(x), own.up_proj(x)))
