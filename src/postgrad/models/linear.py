"""Modules that take the place of a model's own where they are faster or take less memory: linear
layers in oneDNN, fused norms, and embeddings that add a large gradient in place.

torch calls MKL for float32 products. One core of an AMD EPYC (Zen 5) reaches 85 GFLOP/s with MKL
and 200 with oneDNN, which ships with torch too and already does the bfloat16 products. Most of the
time of an update, and of a decoding step, goes into such products. It needs AVX-512.
"""

import functools
import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from postgrad.models.settings import LLAMA_TYPES

LARGE_WEIGHT = 2**24  # numbers of a weight; to the gradient of a larger one parts are added

ROWS = 64  # rows of a product for which oneDNN orders a weight; other numbers of rows work too
# oneDNN compiles code for every shape and caches it, 0.4 MB each, for the last 1024 shapes. Packed
# rows seldom have the same shape twice: a run of a 0.8M model grew by 450 MB in 130 steps and was
# no faster for it. The variables are read at the first product; a value that is set already stays.
SHAPES_KEPT = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY")  # by oneDNN, by torch
for variable in SHAPES_KEPT:
    os.environ.setdefault(variable, "32")


def adds_in_place(weight: Tensor) -> bool:
    """Whether a weight's gradient is added in place.

    Ask in the forward pass, about the parameter itself: the tensor that a backward pass has saved
    may be a copy (gradient checkpointing makes one). Only for float32: hooks on the gradient are
    not called, and the learner has hooks on weights of other dtypes.
    """
    large = weight.dtype == torch.float32 and weight.numel() > LARGE_WEIGHT
    return large and weight.requires_grad and weight.is_leaf


def gradient_of(weight: Tensor) -> Tensor:
    """`weight.grad`, to add to; zeros where there is none yet."""
    if weight.grad is None:
        weight.grad = torch.zeros_like(weight)
    return weight.grad


def rows_at_once(weight: Tensor) -> int:
    """How many rows of a large weight's gradient [rows, columns] are computed and added at once."""
    return max(1, LARGE_WEIGHT // 16 // weight.shape[1])


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


class WordEmbedding(nn.Embedding):
    """nn.Embedding; a large one adds its gradient in place (`adds_in_place`), with the same
    bits.
    """

    def forward(self, input: Tensor) -> Tensor:
        """input: token ids [...]; returns [..., hidden]."""
        plain = self.max_norm is None and not self.scale_grad_by_freq and not self.sparse
        if not plain or not adds_in_place(self.weight):
            return super().forward(input)
        return _EmbeddingRows.apply(input, self.weight, self.padding_idx)  # pyright: ignore[reportReturnType]


class _EmbeddingRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ids: Tensor, weight: Tensor, padding: int | None) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.adds_to, ctx.padding = weight, padding
        return nn.functional.embedding(ids, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, None, None]:
        (ids,) = ctx.saved_tensors
        words, place = ids.unique(return_inverse=True)
        rows = torch.ops.aten.embedding_dense_backward(gradients[0], place, len(words), -1, False)
        if ctx.padding is not None:
            rows[words == ctx.padding] = 0.0
        # each token id once, so that the order of additions does not matter
        gradient_of(ctx.adds_to).index_add_(0, words, rows)
        return None, None, None


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
    return product_for(x)(x, weight, bias)


def product_for(numbers: Tensor) -> Callable[[Tensor, Tensor, Tensor | None], Tensor]:
    """What `project` multiplies with where its arguments have the device and dtype of `numbers`."""
    if numbers.device.type == "cpu" and numbers.dtype == torch.float32 and has_fast_products():
        return _linear
    return nn.functional.linear


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
