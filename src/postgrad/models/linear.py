"""Linear layers whose float32 products run in oneDNN, on CPUs with AVX-512.

torch gives float32 products to MKL, which takes its AVX-512 kernels on Intel's CPUs only: one core
of a Zen 5 does 85 GFLOP/s there and 200 in oneDNN, which ships with torch too and does the bfloat16
products anyway. An update is mostly such products.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable


class OneDNNLinear(nn.Linear):
    """nn.Linear, forward and backward in oneDNN. What is not float32 on a CPU, or has no rows, goes
    torch's way.
    """

    def forward(self, input: Tensor) -> Tensor:
        """input: [..., in]; returns [..., out]."""
        plain = input.dtype == self.weight.dtype == torch.float32 and input.device.type == "cpu"
        if not plain or not input.numel():
            return super().forward(input)
        return _Product.apply(input, self.weight, self.bias)  # pyright: ignore[reportReturnType]


def speed_up(model: nn.Module, device: torch.device) -> None:
    """The model's plain linear layers become OneDNNLinear where that is faster. Parameters, their
    names and what the layers compute stay, up to rounding.
    """
    wide = torch.backends.cpu.get_cpu_capability() == "AVX512"
    if device.type == "cpu" and wide and torch.backends.mkldnn.is_available():
        for module in model.modules():
            if type(module) is nn.Linear:  # a subclass has a forward of its own
                module.__class__ = OneDNNLinear


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(rows, weight)
        return _linear(rows, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        rows, weight = ctx.saved_tensors
        (gradient,) = gradients
        of_rows, of_weight, of_bias = ctx.needs_input_grad
        flat = gradient.reshape(-1, weight.shape[0])
        return (
            _linear(gradient, weight.t()) if of_rows else None,
            _outer(flat, rows.reshape(-1, weight.shape[1])) if of_weight else None,
            flat.sum(0) if of_bias else None,
        )


def _outer(gradient: Tensor, rows: Tensor) -> Tensor:
    """gradient.T @ rows: [N, out], [N, in] -> [out, in]. oneDNN copies its first operand where that
    is transposed: the narrower one is.
    """
    if gradient.shape[1] <= rows.shape[1]:
        return _linear(gradient.t(), rows.t())
    return _linear(rows.t(), gradient.t()).t()


def _linear(rows: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(rows, weight, bias, "none", [], "")
