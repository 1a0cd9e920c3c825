"""Matrix products in float32 by oneDNN, on CPUs with AVX-512.

torch calls MKL for float32 products. One core of an AMD EPYC (Zen 5) reaches 85 GFLOP/s with MKL
and 200 with oneDNN, which ships with torch too and already does the bfloat16 products. Most of the
time of an update, and of a decoding step, goes into such products.
"""

import functools
import os
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from postgrad.models.embedding import WordEmbedding
from postgrad.models.gradients import adds_in_place, gradient_of, rows_at_once

ROWS = 64  # rows of a product for which oneDNN orders a weight; other numbers of rows work too
# oneDNN compiles code for every shape and caches it, 0.4 MB each, for the last 1024 shapes. Packed
# rows seldom have the same shape twice: a run of a 0.8M model grew by 450 MB in 130 steps and was
# no faster for it. The variables are read at the first product; a value that is set already stays.
SHAPES_KEPT = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY")  # by oneDNN, by torch
for variable in SHAPES_KEPT:
    os.environ.setdefault(variable, "32")


@functools.cache
def has_fast_products() -> bool:
    """Whether this CPU has AVX-512, and this torch oneDNN's linear layer."""
    wide = torch.backends.cpu.get_cpu_capability() == "AVX512"
    if not wide or not torch.backends.mkldnn.is_available():
        return False
    try:
        weight = torch.ops.mkldnn._reorder_linear_weight(torch.zeros(1, 1), ROWS)
        _linear(torch.zeros(1, 1), weight)
    except (AttributeError, RuntimeError, NotImplementedError):
        return False  # built without it, or it has another signature there
    return True


@torch.no_grad()
def in_order(weight: Tensor) -> Tensor:
    """A weight [M, K] for `project`: a copy in oneDNN's own order where `project` uses that.

    A product of few rows, as in decoding, spends up to half of its time on that order otherwise.
    """
    if weight.device.type == "cpu" and weight.dtype == torch.float32 and has_fast_products():
        return torch.ops.mkldnn._reorder_linear_weight(weight, ROWS)
    return weight


def project(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x: [N, K], weight: [M, K] as `in_order` gives it, bias: [M]; returns x @ weight.T + bias,
    [N, M], no gradient.
    """
    if x.device.type == "cpu" and x.dtype == torch.float32 and has_fast_products():
        return _linear(x, weight, bias)
    return nn.functional.linear(x, weight, bias)


class OneDNNLinear(nn.Linear):
    """nn.Linear, forward and backward in oneDNN. Inputs that are not float32 on a CPU, or are
    empty, take torch's implementation.
    """

    def forward(self, input: Tensor) -> Tensor:
        """input: [..., in]; returns [..., out]."""
        plain = input.dtype == self.weight.dtype == torch.float32 and input.device.type == "cpu"
        if not plain or not input.numel():
            return super().forward(input)
        return _Product.apply(input, self.weight, self.bias)  # pyright: ignore[reportReturnType]


def speed_up(model: nn.Module, device: torch.device) -> None:
    """On a CPU, turns a model's plain linear layers into OneDNNLinear where that is faster, and its
    embeddings into WordEmbedding. Parameters, their names and outputs stay the same, the outputs up
    to rounding.
    """
    if device.type != "cpu":
        return
    for module in model.modules():  # a subclass has a forward of its own
        if type(module) is nn.Linear and has_fast_products():
            module.__class__ = OneDNNLinear
        elif type(module) is nn.Embedding:
            module.__class__ = WordEmbedding


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(rows, weight)
        # not a saved tensor: with gradient checkpointing that comes back as another tensor
        ctx.adds_to = weight if adds_in_place(weight) else None
        return _linear(rows, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        rows, weight = ctx.saved_tensors
        (gradient,) = gradients
        of_rows, of_weight, of_bias = ctx.needs_input_grad
        flat, inputs = gradient.reshape(-1, weight.shape[0]), rows.reshape(-1, weight.shape[1])
        for_weight = None
        if of_weight and ctx.adds_to is not None:
            _add_outer(gradient_of(ctx.adds_to), flat, inputs)
        elif of_weight:
            for_weight = _outer(flat, inputs)
        return (
            _linear(gradient, weight.t()) if of_rows else None,
            for_weight,
            flat.sum(0) if of_bias else None,
        )


def _add_outer(to: Tensor, gradient: Tensor, rows: Tensor) -> None:
    """Adds gradient.T @ rows to `to` [out, in], some of its rows at a time."""
    count = rows_at_once(to)
    for start in range(0, len(to), count):
        part = slice(start, start + count)
        to[part] += _linear(gradient[:, part].t(), rows.t())


def _outer(gradient: Tensor, rows: Tensor) -> Tensor:
    """gradient.T @ rows: [N, out], [N, in] -> [out, in]. oneDNN copies a transposed first operand,
    so the narrower of the two comes first.
    """
    if gradient.shape[1] <= rows.shape[1]:
        return _linear(gradient.t(), rows.t())
    return _linear(rows.t(), gradient.t()).t()


def _linear(rows: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(rows, weight, bias, "none", [], "")
