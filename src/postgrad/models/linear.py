"""Modules that take the place of a model's own where they are faster or take less memory: linear
layers in oneDNN, fused norms, and embeddings that add a large gradient in place.

torch calls MKL for float32 products. One core of an AMD EPYC (Zen 5) reaches 85 GFLOP/s with MKL
and 200 with oneDNN, which ships with torch too and already does the bfloat16 products. Most of the
time of an update, and of a decoding step, goes into such products. It needs AVX-512. On processors
of Intel MKL can be as fast or faster: a run measures both for each shape (`faster_library`).
"""

import functools
import os
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from postgrad.models.settings import LLAMA_TYPES
from postgrad.parallel.device import WIDEST, cpu_seconds

NARROW = (torch.bfloat16, torch.float16)
LARGE_WEIGHT = 2**24  # numbers of a weight; to the gradient of a larger one parts are added

MKL, ONEDNN = "mkl", "onednn"
_libraries: dict[str, str] = {}  # of this process, by product_name
PROBED_ROWS = 128  # of the products that decide between them
CLEARLY_FASTER = 0.8  # MKL is taken where it needs at most this share of oneDNN's time

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


def sum_gradients_in(master: nn.Parameter, weight: Tensor) -> None:
    """From now on the output head adds its gradient of `weight`, whose dtype is narrow, to
    `master.grad`, which is float32: then nothing is rounded to the narrow dtype on the way.
    """
    weight.master = master  # pyright: ignore[reportAttributeAccessIssue]


def gradient_of(weight: Tensor) -> Tensor:
    """`weight.grad`, to add to; zeros where there is none yet."""
    if weight.grad is None:
        weight.grad = torch.zeros_like(weight)
    return weight.grad


def rows_at_once(weight: Tensor) -> int:
    """How many rows of a large weight's gradient [rows, columns] are computed and added at once."""
    return max(1, LARGE_WEIGHT // 16 // weight.shape[1])


def add_narrow(to: Tensor, gradient: Tensor) -> None:
    """Adds a gradient in a narrow dtype to a float32 sum. A CPU makes a float32 copy of the operand
    first: of a large one it is made in parts.
    """
    if to.device.type != "cpu" or to.numel() <= LARGE_WEIGHT or to.ndim < 2:
        to.add_(gradient)
        return
    count = rows_at_once(to.flatten(1))
    for start in range(0, len(to), count):
        to[start : start + count].add_(gradient[start : start + count])


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


def product_name(rows: int, columns: int) -> str:
    """What a run's choices call a matrix [rows, columns]: "1024x256"."""
    return f"{rows}x{columns}"


def use_libraries(products: Mapping[str, str]) -> None:
    """From now on float32 products on a CPU are those of the libraries that a run chose, by
    `product_name`; of other shapes oneDNN's, where it is there.
    """
    _libraries.clear()
    _libraries.update(products)


def uses_onednn(weight: Tensor) -> bool:
    """Whether float32 products with a matrix on a CPU are oneDNN's: where it is there, and the run
    has not found MKL clearly faster for this shape.
    """
    return has_fast_products() and _libraries.get(product_name(*weight.shape)) != MKL


def faster_library(rows: int, columns: int) -> str:
    """Measures a matrix [rows, columns] in both libraries: the three products of a learner. MKL has
    to be clearly faster, so that noise does not decide.
    """
    rows, columns = min(rows, WIDEST), min(columns, WIDEST)
    weight, states = torch.full((rows, columns), 0.25), torch.full((PROBED_ROWS, columns), 0.5)
    gradient = torch.full((PROBED_ROWS, rows), 0.5)

    def onednn() -> object:
        outer = _onednn_outer(gradient, states)
        return _linear(states, weight), _linear(gradient, weight.t()), outer

    def mkl() -> object:
        return states @ weight.t(), gradient @ weight, gradient.t() @ states

    ours, theirs = cpu_seconds([onednn, mkl])
    return MKL if theirs < CLEARLY_FASTER * ours else ONEDNN


@torch.no_grad()
def in_order(weight: Tensor) -> Tensor:
    """A weight [M, K] for `project`: a copy in oneDNN's own order where `project` uses that.

    A product of few rows, as in decoding, spends up to half of its time on that order otherwise.
    """
    if _is_fast(weight, weight):
        return torch.ops.mkldnn._reorder_linear_weight(weight, ROWS)
    return weight


def project(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x: [N, K], weight: [M, K] as `in_order` gives it, bias: [M]; returns x @ weight.T + bias,
    [N, M], no gradient.
    """
    return (_linear if _is_fast(x, weight) else nn.functional.linear)(x, weight, bias)


def product_for(weight: Tensor) -> Callable[[Tensor, Tensor, Tensor | None], Tensor]:
    """What `project` multiplies with where numbers have the device and dtype of `weight` [M, K]."""
    return _linear if _is_fast(weight, weight) else nn.functional.linear


class OneDNNLinear(nn.Linear):
    """nn.Linear, forward and backward in oneDNN. Inputs that are not float32 on a CPU, or are
    empty, take torch's implementation.
    """

    def forward(self, input: Tensor) -> Tensor:
        """input: [..., in]; returns [..., out]."""
        plain = input.dtype == self.weight.dtype == torch.float32 and input.device.type == "cpu"
        if not plain or not input.numel():
            return super().forward(input)
        return _product(input, self.weight, self.bias)


def multiply(x: Tensor, weight: Tensor) -> Tensor:
    """x @ weight.T of one dtype, with gradients: x: [..., in], weight: [out, in]. Float32 products
    on a CPU are those of `uses_onednn`.
    """
    if x.numel() and _is_fast(x, weight):
        return _product(x, weight, None)
    return nn.functional.linear(x, weight)


def speed_up(model: nn.Module, device: torch.device) -> None:
    """On a CPU, turns a model's plain linear layers into OneDNNLinear where that is faster, and its
    embeddings into WordEmbedding. Parameters, their names and outputs stay the same, the outputs up
    to rounding.
    """
    if device.type != "cpu":
        return
    for module in model.modules():  # a subclass has a forward of its own
        if type(module) is nn.Linear and uses_onednn(module.weight):
            module.__class__ = OneDNNLinear
        elif type(module) is nn.Embedding:
            module.__class__ = WordEmbedding


class MatrixGradient:
    """The gradient of a matrix [M, K], summed over runs of rows in float32 whatever the dtype of
    the matrix, so that the runs do not matter. Create it in the forward pass (`adds_in_place`).
    """

    def __init__(self, weight: Tensor) -> None:
        self._adds_to: Tensor | None = getattr(weight, "master", None)
        by_autograd = weight.device.type == "cpu" and not uses_onednn(weight)
        if self._adds_to is None and adds_in_place(weight) and not by_autograd:
            self._adds_to = weight
        self._onednn = weight.device.type == "cpu" and uses_onednn(weight)
        self._dtype = weight.dtype
        self._sum: Tensor | None = None

    def add(self, gradient: Tensor, rows: Tensor) -> None:
        """Adds gradient.T @ rows, for a gradient [N, M] of the product's results at rows [N, K]."""
        if self._adds_to is not None:
            self._sum = gradient_of(self._adds_to)
        if rows.device.type == "cpu" or rows.dtype not in NARROW:
            wide = torch.promote_types(rows.dtype, torch.float32)
            self._add_wide(gradient.to(wide), rows.to(wide))
            return
        transposed = gradient.to(rows.dtype).t()
        if self._sum is None:
            self._sum = torch.mm(transposed, rows, out_dtype=torch.float32)
        else:
            torch.addmm(self._sum, transposed, rows, out_dtype=torch.float32, out=self._sum)

    def _add_wide(self, gradient: Tensor, rows: Tensor) -> None:
        if self._sum is None:
            self._sum = self._outer(gradient, rows)
        elif self._adds_to is not None and self._sum.numel() > LARGE_WEIGHT:
            _add_outer(self._sum, gradient, rows, onednn=self._onednn)
        else:
            self._sum.add_(self._outer(gradient, rows))

    def _outer(self, gradient: Tensor, rows: Tensor) -> Tensor:
        on = self._onednn and rows.dtype == torch.float32
        return _onednn_outer(gradient, rows) if on else gradient.t() @ rows

    def rest(self) -> Tensor | None:
        """What autograd has to add to the matrix's gradient, in its dtype: all, or nothing (None)
        where it was added in place.
        """
        total, self._sum = self._sum, None  # the graph, and so this object, lives on for a while
        if self._adds_to is not None or total is None:
            return None
        return total.to(self._dtype)


def from_outputs(gradient: Tensor, weight: Tensor) -> Tensor:
    """The gradient [N, K] of a product's rows from that of its results [N, M]; weight: [M, K]."""
    return _linear(gradient, weight.t()) if _is_fast(gradient, weight) else gradient @ weight


def _is_fast(x: Tensor, weight: Tensor) -> bool:
    """Whether a product of `x` with a matrix is oneDNN's."""
    return x.device.type == "cpu" and x.dtype == torch.float32 and uses_onednn(weight)


def _product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x: [..., in]; returns [..., out]. The function gets rows: what it returns must not be a view,
    which a model could not write over (gemma3n does).
    """
    out: Any = _Product.apply(x.reshape(-1, x.shape[-1]), weight, bias)
    return out.view(*x.shape[:-1], len(weight))


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
            for_weight = _onednn_outer(flat, inputs)
        return (
            _linear(gradient, weight.t()) if of_rows else None,
            for_weight,
            flat.sum(0) if of_bias else None,
        )


def _add_outer(to: Tensor, gradient: Tensor, rows: Tensor, *, onednn: bool = True) -> None:
    """Adds gradient.T @ rows to `to` [out, in], some of its rows at a time."""
    count = rows_at_once(to)
    for start in range(0, len(to), count):
        part = slice(start, start + count)
        columns = gradient[:, part].t()
        to[part] += _linear(columns, rows.t()) if onednn else columns @ rows


def _onednn_outer(gradient: Tensor, rows: Tensor) -> Tensor:
    """gradient.T @ rows: [N, out], [N, in] -> [out, in]. oneDNN copies a transposed first operand,
    so the narrower of the two comes first.
    """
    if gradient.shape[1] <= rows.shape[1]:
        return _linear(gradient.t(), rows.t())
    return _linear(rows.t(), gradient.t()).t()


def _linear(rows: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(rows, weight, bias, "none", [], "")
