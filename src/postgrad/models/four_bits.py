"""Linear layers whose frozen weights are held in four bits (QLoRA, arXiv:2305.14314).

transformers' loader quantises the matrices of the decoder's layers one by one as it reads them, so
the model is never whole in full precision. A product expands its matrix, in the dtype of its input,
and drops it again; so does the backward pass. Embeddings, norms and heads stay as they are.
"""

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from transformers.core_model_loading import ConversionOps
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.quantizers.quantizers_utils import get_module_from_name
from transformers.utils.quantization_config import QuantizationConfigMixin

from postgrad.models.attention import layers_of
from postgrad.models.linear import project
from postgrad.models.refusals import several_matrices
from postgrad.ops.quantization import (
    BLOCK,
    WIDE_BLOCK,
    FourBits,
    dequantize_4bit,
    quantize_4bit,
)

Quantize = Literal["none", "4bit"]
METHOD = "postgrad_4bit"  # the name by which transformers' loader finds `_Quantizer`


class FourBitLinear(nn.Linear):
    """Takes the place of a linear layer whose weight is frozen. `weight` holds the codes of its
    FourBits, [out * in / 2] uint8, and has no gradient.
    """

    scales: Tensor
    maxima: Tensor
    offset: Tensor

    def __init__(self, linear: nn.Linear) -> None:
        """linear: as transformers made it, on the meta device: the loader brings the numbers."""
        nn.Module.__init__(self)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight, self.bias = linear.weight, linear.bias
        groups = -(-linear.weight.numel() // (BLOCK * WIDE_BLOCK))
        self.register_buffer("scales", torch.empty(groups, WIDE_BLOCK, dtype=torch.uint8))
        self.register_buffer("maxima", torch.empty(groups, 1, dtype=torch.float32))
        self.register_buffer("offset", torch.empty(1, dtype=torch.float32))

    def expanded(self, dtype: torch.dtype) -> Tensor:
        """The weight [out, in] in `dtype`."""
        packed = FourBits(self.weight.detach(), self.scales, self.maxima, self.offset)
        shape = torch.Size((self.out_features, self.in_features))
        return dequantize_4bit(packed, shape, dtype)

    def forward(self, input: Tensor) -> Tensor:
        """input: [..., in]; returns [..., out]."""
        return _ExpandedProduct.apply(input, self)  # pyright: ignore[reportReturnType]


class _ExpandedProduct(torch.autograd.Function):
    """x @ W.T + b, which keeps nothing: the backward pass expands W again."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, layer: FourBitLinear) -> Tensor:
        ctx.layer = layer
        flat = rows.reshape(-1, layer.in_features)
        out = project(flat, layer.expanded(rows.dtype), layer.bias)
        return out.view(*rows.shape[:-1], layer.out_features)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (gradient,), layer = gradients, ctx.layer
        flat = gradient.reshape(-1, layer.out_features)
        out = project(flat, layer.expanded(gradient.dtype).t(), None)
        return out.view(*gradient.shape[:-1], layer.in_features), None


def base_weight(layer: Any) -> Tensor:
    """The weight of a linear layer, or of the one under an adapter's, [out, in]; of four bits in
    float32.
    """
    linear = layer.get_base_layer() if hasattr(layer, "get_base_layer") else layer
    return linear.expanded(torch.float32) if isinstance(linear, FourBitLinear) else linear.weight


def in_four_bits(lm: nn.Module) -> bool:
    """Whether matrices of a model are held in four bits."""
    return any(isinstance(module, FourBitLinear) for module in lm.modules())


def packable(layer: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Linear]]:
    """The linear layers of a decoder layer that four bits hold, each with the module that has it
    and its name there: all but those whose weights that module reads itself (models/states.py).
    """
    # Only where weights are quantised, or counted.
    from postgrad.models.states import weights_read_by

    for module in list(layer.modules()):
        read = weights_read_by(type(module))
        for name, child in list(module.named_children()):
            if type(child) is nn.Linear and name not in read:
                yield module, name, child


def twin(lm: nn.Module) -> nn.Module:
    """A second model on the same weights, buffers and adapters: nothing is copied, and what changes
    in place changes in both. Which adapter acts, hooks and modes are its own; it is in eval mode.
    """
    shared: dict[int, Any] = {id(t): t for t in chain(lm.parameters(), lm.buffers())}
    return copy.deepcopy(lm, shared).train(False)


def loading_arguments(quantize: Quantize, device: torch.device) -> dict[str, Any]:
    """More arguments of from_pretrained, which reads onto `device` then; {} for "none"."""
    if quantize == "none":
        return {}
    return {"quantization_config": _Config(METHOD), "device_map": {"": device}}  # pyright: ignore[reportArgumentType]


@register_quantization_config(METHOD)
@dataclass
class _Config(QuantizationConfigMixin):
    quant_method: str = METHOD  # pyright: ignore[reportIncompatibleVariableOverride]


@register_quantizer(METHOD)
class _Quantizer(HfQuantizer):
    """What transformers' loader asks while it reads a model that is not quantised yet."""

    requires_calibration = False
    is_trainable = True  # pyright: ignore[reportAssignmentType, reportIncompatibleMethodOverride]

    def param_element_size(self, model: Any, param_name: str, param: Tensor) -> float:
        """Bytes of a number, by which the loader takes memory ahead."""
        return 0.5 if self.param_needs_quantization(model, param_name) else param.element_size()

    def is_serializable(self, *_: Any, **__: Any) -> bool:
        return False

    def _process_model_before_weight_loading(self, model: Any, **_: Any) -> None:
        """Every packable layer of the decoder becomes a FourBitLinear; a tower stays as it is.
        Raises UsageError for matrices that are no layers of their own, as experts are.
        """
        for layer in layers_of(model):
            for above, name, linear in packable(layer):
                with torch.device("meta"):
                    setattr(above, name, FourBitLinear(linear))
            for module in layer.modules():
                if isinstance(module, nn.Conv1d):
                    continue  # of each channel alone: a few numbers
                if any(p.ndim > 2 for p in module.parameters(recurse=False)):
                    raise several_matrices(type(module).__name__, model.config.model_type)

    def param_needs_quantization(self, model: Any, param_name: str, **_: Any) -> bool:
        module, name = get_module_from_name(model, param_name)
        return isinstance(module, FourBitLinear) and name == "weight"

    def get_quantize_ops(self) -> "_Pack":
        return _Pack()

    def postprocess_model(self, model: Any, **_: Any) -> None:
        """The model is a plain one from here on."""
        self.remove_quantization_config(model)


class _Pack(ConversionOps):
    """A weight as it was read -> its FourBits, by the names that they have in a FourBitLinear."""

    @torch.no_grad()
    def convert(self, input_dict: dict[str, Any], **_: Any) -> dict[str, Tensor]:  # pyright: ignore[reportIncompatibleMethodOverride]
        packed: dict[str, Tensor] = {}
        for name, weight in input_dict.items():
            codes, *rest = quantize_4bit(weight[0] if isinstance(weight, list) else weight)
            packed[name] = nn.Parameter(codes, requires_grad=False)
            owner = name.rpartition(".")[0]
            packed |= {
                f"{owner}.{field}": t for field, t in zip(FourBits._fields[1:], rest, strict=True)
            }
        return packed
