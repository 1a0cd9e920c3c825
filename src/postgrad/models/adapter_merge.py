"""Adapters of PEFT merged into the weights of their base."""

from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from postgrad.core.errors import UsageError
from postgrad.models.adapter_parameters import is_of_parameter, merge_parameters
from postgrad.models.adapter_reader import HEAD, HEAD_WEIGHT, LAYER, PREFIX, AdapterFile
from postgrad.models.adapter_targets import linear_layers
from postgrad.models.files import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from postgrad.models.stored import StoredTensor


@torch.no_grad()
def merge_adapter(lm: nn.Module, adapter: AdapterFile, path: str, *, weight: float = 1.0) -> None:
    """Adds weight (alpha / rank) B A to the weights of `lm`, the adapter's base, in float32, and
    rounds each sum once to the dtype of `lm`. With DoRA the rows of the sum get the lengths that
    were trained. A score head takes the place of the one in `lm`, as float32, and so does every
    module that was trained whole.

    path: of the adapter, for messages. Raises UsageError, and changes nothing, where the adapter is
    of another model.
    """
    layers = linear_layers(lm)
    names = {match[1] for name in adapter.weights if (match := LAYER.fullmatch(name))}
    stacks = {name for name in names if is_of_parameter(name, adapter.parameters)}
    names -= stacks
    missing = sorted(n for n in layers if adapter.settings.adapts(n) and n not in names)
    if missing:
        raise UsageError(
            f"{path}/{ADAPTER_WEIGHTS} has no weights for {missing[0]} and {len(missing) - 1} "
            f"more layers that {ADAPTER_CONFIG} names: it is cut, or adapts layers of the same "
            "name in part; copy it again, or merge it into its base with PEFT"
        )
    products = _products(adapter, names, layers, path)
    merge_parameters(
        lm, _factors(adapter, stacks), adapter.parameters, adapter.settings, weight,
        f"{path}/{ADAPTER_WEIGHTS}",
    )  # fmt: skip
    for name, pair in products.items():
        matrix = layers[name].weight
        magnitude = adapter.magnitudes.get(name)
        scale = adapter.settings.scale_of(name)
        merged = partial(changed_matrix, pair, scale, magnitude, weight)
        if isinstance(matrix, StoredTensor):
            layers[name].weight = nn.Parameter(matrix.mapped(merged))
        else:
            matrix.copy_(merged(matrix))
    _replace_modules(lm, adapter, path)
    if adapter.scores:
        _replace_head(lm, adapter, path)


def _products(
    adapter: AdapterFile, names: Iterable[str], layers: Mapping[str, nn.Linear], path: str
) -> dict[str, tuple[Tensor, Tensor]]:
    """B and A by the name of the layer that they change. Raises UsageError where the base has none
    of that name and shape.
    """
    products: dict[str, tuple[Tensor, Tensor]] = {}
    for name in sorted(names):
        a, b = (adapter.weights[f"{PREFIX}{name}.lora_{letter}.weight"] for letter in "AB")
        wanted = tuple(layers[name].weight.shape) if name in layers else None
        if wanted != (b.shape[0], a.shape[1]):
            is_there = f"is of shape {wanted}" if wanted else "is no linear layer of its decoder"
            raise UsageError(
                f"{path}/{ADAPTER_WEIGHTS} changes {name} by a matrix of shape "
                f"{(b.shape[0], a.shape[1])}, which in {adapter.base} {is_there}: the adapter was "
                "trained on another model; correct base_model_name_or_path"
            )
        products[name] = (b, a)
    return products


def _factors(adapter: AdapterFile, names: set[str]) -> dict[str, tuple[Tensor, Tensor]]:
    """A and B of layers of the file."""
    weights, start = adapter.weights, PREFIX
    return {
        name: (
            weights[f"{start}{name}.lora_A.weight"],
            weights[f"{start}{name}.lora_B.weight"],
        )
        for name in names
    }


def changed_matrix(
    factors: tuple[Tensor, Tensor],
    scale: float,
    magnitude: Tensor | None,
    share: float,
    weight: Tensor,
) -> Tensor:
    """weight + share * what the adapter changes, in float32. factors: B and A. magnitude: of DoRA
    the length of each row of the changed matrix.
    """
    b, a = (factor.float().to(weight.device) for factor in factors)
    if magnitude is None:
        return torch.addmm(weight.float(), b, a, alpha=share * scale)
    changed = torch.addmm(weight.float(), b, a, alpha=scale)
    lengths = torch.linalg.vector_norm(changed, dim=1)
    lengths = torch.where(lengths > 0, lengths, 1.0)  # a row of zeros stays one
    changed *= (magnitude.float().to(weight.device) / lengths)[:, None]
    return changed if share == 1 else torch.lerp(weight.float(), changed, share)


def _replace_modules(lm: nn.Module, adapter: AdapterFile, path: str) -> None:
    """Puts the weights that were trained whole in the place of the base's."""
    parameters = dict(lm.named_parameters(remove_duplicate=False))
    for name, tensor in adapter.saved.items():
        wanted = tuple(parameters[name].shape) if name in parameters else None
        if wanted != tuple(tensor.shape):
            there = f"is of shape {wanted}" if wanted else "is not there"
            raise UsageError(
                f"{path}/{ADAPTER_WEIGHTS} has {name} of shape {tuple(tensor.shape)}, which in "
                f"{adapter.base} {there}: the adapter was trained on another model"
            )
        twins = [twin for twin, p in parameters.items() if p is parameters[name] and twin != name]
        if any(twin not in adapter.saved for twin in twins):
            raise UsageError(
                f"{path}/{ADAPTER_WEIGHTS} replaces {name}, which {adapter.base} ties to "
                f"{twins[0]}: merge it into its base with PEFT, and name the merged model"
            )
        owner, _, end = name.rpartition(".")
        replaced = nn.Parameter(tensor.to(parameters[name].device, parameters[name].dtype))
        setattr(lm.get_submodule(owner), end, replaced)


def _replace_head(lm: Any, adapter: AdapterFile, path: str) -> None:
    weight = adapter.weights[HEAD_WEIGHT]
    if not hasattr(lm, HEAD):
        raise UsageError(
            f"{path} is the adapter of a reward model or critic (it has a score head): it scores "
            "texts and writes none; ask it with postgrad serve-reward"
        )
    if weight.shape != lm.score.weight.shape:
        raise UsageError(
            f"{path}/{ADAPTER_WEIGHTS}: {HEAD_WEIGHT} has shape {tuple(weight.shape)}; expected "
            f"one score from {lm.score.weight.shape[1]} features"
        )
    lm.score.weight = nn.Parameter(weight.float().to(lm.score.weight.device))
