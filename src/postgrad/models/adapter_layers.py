"""The linear layers that adapters stand on: PEFT's, with a forward of our own and fresh weights.

PEFT's forward multiplies the input by A once for each of q/k/v and of gate/up, in torch's products
and in float32. Here sibling layers that read the same input share one product with all their A,
where layers are compiled also those with their own matrices and with all their B
(adapter_products), and on a CPU products are those of models.linear. A and B are float32 and are
rounded to the dtype of the input, as the weights of a model without adapters are rounded from their
masters: a GPU's tensor cores multiply bfloat16 up to 16 times as fast as float32. Modules,
parameters and their names are PEFT's.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, cast

import torch
from peft.tuners.lora import Linear
from torch import Tensor, nn

from postgrad.core.progress import report
from postgrad.models.adapter_dropout import CounterDropout, RowMasks
from postgrad.models.adapter_mixtures import AdaptedWeight, frozen_name
from postgrad.models.adapter_products import changed_products, narrow_products
from postgrad.models.adapter_reader import HEAD
from postgrad.models.adapter_start import (
    FreshA,
    StartingFactors,
    fresh_factors,
    principal_factors,
)
from postgrad.models.decoder import joined
from postgrad.models.four_bits import base_weight
from postgrad.models.linear import multiply
from postgrad.models.score import in_float32
from postgrad.models.settings import KAIMING, SIBLINGS
from postgrad.models.stored import Box, StoredTensor, real, whole_box


class _SharedParts:
    """Results of one product for layers that read the same x, computed when the first is called. A
    layer looks whether it was given the input that its sibling had: where an architecture gives
    others, that costs products and changes no result.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._forget()

    def _forget(self) -> None:
        self._input: Tensor | None = None
        self._parts: list[Tensor | None] = [None] * self._count

    def of(self, place: int, x: Tensor, parts: Callable[[Tensor], dict[int, Tensor]]) -> Tensor:
        """The part of the layer at `place`, which `parts` gives for some of the layers."""
        if self._input is not x or self._parts[place] is None:
            computed = parts(x)
            self._forget()
            self._input = x
            for number, part in computed.items():
                self._parts[number] = part
        part, self._parts[place] = self._parts[place], None
        assert part is not None
        if all(other is None for other in self._parts):
            self._forget()  # nothing of a forward is held after it
        return part


class Siblings:
    """Layers of one block that read the same x. They share the product x A^T with all their A, and
    once their matrices are joined those with W and with B too.
    """

    def __init__(self, layers: "list[AdaptedLinear]") -> None:
        self._layers = layers
        self._rows, self._results, self._changed = (_SharedParts(len(layers)) for _ in range(3))
        self._joined: tuple[Tensor, Tensor | None] | None = None

    def changed(self, place: int, name: str, x: Tensor) -> Tensor:
        """W x + b + (alpha / rank) B A x [..., out] of the layer at `place`. x: [..., in]."""
        layer = self._layers[place]
        if self._joined is None:
            change = narrow_products(self._rows_of(place, name, x), [layer.matrices(name)[1]])
            return torch.add(self.result(place, x), change, alpha=layer.scaling[name])
        base = self._joined

        def parts(x: Tensor) -> dict[int, Tensor]:
            pairs = [each.matrices(name) for each in self._layers]
            all_a, all_b = [a for a, _ in pairs], [b for _, b in pairs]
            scales = [each.scaling.get(name, 1.0) for each in self._layers]
            products = changed_products(x, base, scales, all_a, all_b)
            split = products.split([each.out_features for each in self._layers], -1)
            return {n: part for n, part in enumerate(split) if name in self._layers[n].lora_A}

        return self._changed.of(place, x, parts)

    def _rows_of(self, place: int, name: str, x: Tensor) -> Tensor:
        """x A^T [..., rank] of the layer at `place`."""

        def parts(x: Tensor) -> dict[int, Tensor]:
            members = [n for n, layer in enumerate(self._layers) if name in layer.lora_A]
            matrices = [self._layers[n].matrices(name)[0] for n in members]
            products = narrow_products(x, matrices)
            split = products.split([len(matrix) for matrix in matrices], -1)
            return dict(zip(members, split, strict=True))

        return self._rows.of(place, x, parts)

    def result(self, place: int, x: Tensor) -> Tensor:
        """W x + b [..., out] of the layer at `place`."""
        if self._joined is None:
            return self._layers[place].base_layer(x)
        weight, bias = self._joined

        def parts(x: Tensor) -> dict[int, Tensor]:
            products = nn.functional.linear(x, weight, bias)
            split = products.split([layer.out_features for layer in self._layers], -1)
            return dict(enumerate(split))

        return self._results.of(place, x, parts)

    def join(self) -> None:
        """Puts the frozen matrices side by side, as views of one, where all of them are plain."""
        bases: list[Any] = [layer.base_layer for layer in self._layers]
        biases = [base.bias for base in bases if base.bias is not None]
        tensors = [base.weight for base in bases] + biases
        alike = len({(t.dtype, t.device) for t in tensors}) == 1
        plain = all(type(base) is nn.Linear for base in bases) and all(
            type(t) is nn.Parameter and not t.requires_grad for t in tensors
        )
        if plain and alike and len(biases) in (0, len(bases)):
            weight = joined([base.weight for base in bases])
            self._joined = weight, joined(biases) if biases else None


class AdaptedLinear(Linear):
    """PEFT's layer: W x + b + (alpha / rank) B A dropout(x), with A and B in the dtype of x. At
    most one adapter acts, and it is never merged.

    With DoRA's lengths m [out]: f (W x + (alpha / rank) B A dropout(x)) + b, where f is m divided
    by the lengths of the rows of W + (alpha / rank) B A, which have no gradient (section 4.3).
    """

    siblings: Siblings
    place: int
    lora_start: nn.ModuleDict  # StartingFactors of adapters by PiSSA

    def matrices(self, name: str) -> tuple[Tensor, Tensor]:
        """A [rank, in] and B [out, rank] of an adapter, of rank 0 where the layer has none; with
        PiSSA those whose product is what the adapter changes, of twice the rank.
        """
        if name not in self.lora_A:
            like: Any = self.base_layer.weight
            return like.new_empty(0, self.in_features), like.new_empty(self.out_features, 0)
        a: Any = self.lora_A[name]
        b: Any = self.lora_B[name]
        return self.beside_start(name, a.weight, b.weight)

    def beside_start(self, name: str, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        """A and B of an adapter, with PiSSA beside those that it began with."""
        if name not in self.lora_start:
            return a, b
        start: Any = self.lora_start[name]
        return start.beside(a, b)

    def forward(self, x: Tensor, *_: Any, **__: Any) -> Tensor:
        """x: [..., in]; returns [..., out] in the dtype of the base's result."""
        name = self.active_adapters[0]
        if self.disable_adapters or name not in self.lora_A:
            return self.siblings.result(self.place, x)
        (a, b), scale = self.matrices(name), self.scaling[name]
        dropout = self.lora_dropout[name]
        if isinstance(dropout, CounterDropout) and dropout.acts:  # every layer drops other inputs
            change = narrow_products(narrow_products(dropout(x), [a]), [b])
            changed = torch.add(self.siblings.result(self.place, x), change, alpha=scale)
        else:
            changed = self.siblings.changed(self.place, name, x)
        if name not in self.lora_magnitude_vector:
            return changed
        lengths: Any = self.lora_magnitude_vector[name]
        factor = lengths.weight / self._row_lengths(a, b, scale)
        bias: Any = self.base_layer.bias
        product = changed if bias is None else changed - bias
        return (changed + (factor - 1) * product).to(changed.dtype)

    @torch.no_grad()
    def _row_lengths(self, a: Tensor, b: Tensor, scale: float) -> Tensor:
        """[out] float32, or float64, the lengths of the rows of W + scale B A, without that matrix;
        1 for rows of zeros. Where B is zero they are those of `give_lengths`, to the bit.
        """
        weight = base_weight(self)
        plain = row_lengths(weight).to(a.dtype)
        mixed = multiply(a.to(weight.dtype), weight).to(a.dtype).T  # W A^T [out, rank]
        longer = (b * (2 * scale * mixed + scale**2 * (b @ (a @ a.T)))).sum(1)  # of the squares
        changed = (plain.square() + longer).clamp(min=0).sqrt()
        lengths = torch.where(longer == 0, plain, changed)
        return torch.where(lengths > 0, lengths, 1.0)


def own_layers(lm: nn.Module) -> None:
    """Turns the linear layers that PEFT adapted into AdaptedLinear. Those that are it already stay
    as they are.
    """
    for block in lm.modules():
        fresh = {n: child for n, child in block.named_children() if type(child) is Linear}
        if not fresh:
            continue
        groups = [names for names in SIBLINGS if fresh.keys() & set(names)]
        groups += [(name,) for name in fresh if not any(name in names for names in groups)]
        for names in groups:
            layers: list[Any] = [
                block.get_submodule(name)
                for name in names
                if isinstance(getattr(block, name, None), Linear)
            ]
            siblings = Siblings(layers)
            for place, layer in enumerate(layers):
                layer.__class__ = AdaptedLinear
                layer.lora_start = nn.ModuleDict()
                layer.siblings, layer.place = siblings, place


def join_siblings(lm: nn.Module) -> None:
    """From now on frozen matrices of layers that read the same input are one product. To be called
    once the weights have their places: whoever puts other tensors there has to call it again.
    """
    layers = [layer for layer in lm.modules() if isinstance(layer, AdaptedLinear)]
    for siblings in {id(layer.siblings): layer.siblings for layer in layers}.values():
        siblings.join()


@torch.no_grad()
def give_weights(
    lm: nn.Module, layers: Iterator[tuple[str, Any]], name: str, init: str, seed: int
) -> None:
    """Kaiming-uniform A with a = sqrt(5), which is +-1 / sqrt(inputs), and zero B, or those of
    PiSSA; the score head's copy. layers: those of `lm` with the adapter `name`, by name.
    """
    adapted = list(layers)
    table = "critic.model.lora" if name == "critic" else "model.lora"  # roles name their adapters
    for number, (layer_name, layer) in enumerate(adapted):
        if init != KAIMING:
            report("matrices for PiSSA", number, len(adapted))
        if isinstance(copies := getattr(layer, "modules_to_save", None), nn.ModuleDict):
            if layer_name == HEAD:
                in_float32(copies[name])
            continue
        rank = layer.r[name]
        if isinstance(layer, AdaptedWeight):
            base: Any = lm.get_parameter(frozen_name(layer_name, layer))
            shape_a, shape_b = layer.shapes(rank)
        else:
            base = layer.get_base_layer().weight
            shape_a, shape_b = (rank, layer.in_features), (layer.out_features, rank)
        if init != KAIMING and not base.is_meta:
            weight = real(base_weight(layer))
            scale = layer.scaling[name]
            a, b = principal_factors(weight, rank, scale, init, seed, layer_name, table)
            cast(nn.ModuleDict, layer.lora_start)[name] = StartingFactors(a, b)
        else:
            draw = FreshA(seed, f"lora {name} {layer_name}", layer.in_features)
            a, b = fresh_factors(base, shape_a, shape_b, draw)
        layer.lora_A[name].weight = nn.Parameter(a)
        layer.lora_B[name].weight = nn.Parameter(b)


def row_lengths(weight: Tensor) -> Tensor:
    """[out] the lengths of the rows of a matrix, in float32 or, of float64, in that."""
    dtype = torch.float64 if weight.dtype == torch.float64 else torch.float32
    return torch.linalg.vector_norm(weight, dim=1, dtype=dtype)


@torch.no_grad()
def give_lengths(layers: Iterator[tuple[str, Any]], name: str) -> None:
    """DoRA's lengths for the adapter `name`: those of the rows of the frozen matrices, by PEFT's
    name. layers: those with the adapter, by name.
    """
    for _, layer in layers:
        if isinstance(getattr(layer, "modules_to_save", None), nn.ModuleDict):
            continue  # a module that trains whole
        base, holder = layer.get_base_layer().weight, nn.Module()
        if isinstance(base, StoredTensor):
            shape = (layer.out_features,)
            lengths = StoredTensor(shape, torch.float32, base.device, _StoredLengths(base))
        else:
            lengths = row_lengths(base_weight(layer))
        holder.weight = nn.Parameter(lengths)
        layer.lora_magnitude_vector[name] = holder


@dataclass(frozen=True, slots=True)
class _StoredLengths:
    """Blocks of the lengths of the rows of a matrix that lies in its file."""

    weight: StoredTensor

    def __call__(self, box: Box) -> Tensor:
        return row_lengths(self.weight.block((box[0], whole_box(self.weight.shape)[1])))


def give_dropout(
    layers: Iterator[tuple[str, Any]], name: str, p: float, seed: int
) -> RowMasks | None:
    """Dropout by counters in front of the A of the adapter `name`; None where p is 0."""
    if p == 0.0:
        return None
    masks = RowMasks(seed, p)
    for layer_name, layer in layers:
        if hasattr(layer, "lora_dropout"):
            device = layer.get_base_layer().weight.device
            layer.lora_dropout[name] = CounterDropout(
                masks, f"{name} {layer_name}", layer.in_features, device
            )
    return masks
