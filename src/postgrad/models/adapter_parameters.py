"""PEFT's `target_parameters` in an adapter's files: which weight each A and B changes, and where.

A file has the name of the module that has the weight, and not the weight's. Where an adapter
changes several weights of a module, PEFT nests their wrappers in the order of the module's
parameters, the last outside: with experts.gate_up_proj and experts.down_proj "experts.lora_A" is of
down_proj and "experts.base_layer.lora_A" of gate_up_proj.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from postgrad.core.errors import UsageError
from postgrad.models.adapter_mixtures import changed_stack, in_peft
from postgrad.models.settings import EXPERTS, LoraSettings
from postgrad.models.stored import StoredTensor

INSIDE = ".base_layer"


def is_of_parameter(layer: str, parameters: Sequence[str]) -> bool:
    """Whether what a file calls `layer` wraps a weight, by the names that the config has."""
    while layer.endswith(INSIDE):
        layer = layer.removesuffix(INSIDE)
    owners = [name.rpartition(".")[0] or EXPERTS for name in parameters]
    return any(f".{layer}".endswith(f".{owner}") for owner in owners)


def as_targets(parameters: Sequence[str]) -> list[str]:
    """The names as LoraSettings.targets has them: ("mlp.experts.down_proj", "mlp.gate")."""
    ends = [name if "." in name else f"{EXPERTS}.{name}" for name in parameters]
    return list(dict.fromkeys(name.removesuffix(".weight") for name in ends))


def ends_of(names: Iterable[str]) -> list[str]:
    """The names of weights without their layers, each once: "mlp.experts.down_proj"."""
    return list(dict.fromkeys(".".join(name.split(".")[-3:]) for name in names))


def weights_of(lm: nn.Module, parameters: Sequence[str]) -> dict[str, str]:
    """By name of a layer in the file, the name in `lm` of the weight that it changes."""
    weights: dict[str, str] = {}
    for owner, module in lm.named_modules():
        named = [f"{owner}.{end}" for end, _ in module.named_parameters(recurse=False)]
        wanted = [n for n in named if any(f".{n}".endswith(f".{end}") for end in parameters)]
        for later, name in enumerate(reversed(wanted)):
            weights[in_peft(owner, later)] = name
    return weights


def merge_parameters(
    lm: nn.Module,
    layers: Mapping[str, tuple[Tensor, Tensor]],
    parameters: Sequence[str],
    settings: LoraSettings,
    share: float,
    file: str,
) -> None:
    """Adds share * scale * B A of every expert to the weights that are named. layers: A and B by
    name in the file. settings: their ranks and scales. Raises UsageError, and changes nothing,
    where they are of another model.
    """
    weights = weights_of(lm, parameters)
    for name in sorted(weights.keys() ^ layers.keys()):
        problem = "has no weights for" if name in weights else "changes, of target_parameters,"
        raise UsageError(
            f"{file} {problem} {weights.get(name, name)}, "
            + ("which its config names: it is cut" if name in weights else "and its base has none")
        )
    changes: list[tuple[Any, str, Any]] = []
    for name, (a, b) in layers.items():
        rank, scale = settings.rank_of(weights[name]), settings.scale_of(weights[name])
        owner, _, end = weights[name].rpartition(".")
        module = lm.get_submodule(owner)
        weight: Any = module.get_parameter(end)
        transposed = weight.ndim == 3 and bool(getattr(module, "is_transposed", False))
        _require_shape(weight, a, b, weights[name], file, rank=rank, transposed=transposed)

        def merged(w: Tensor, b: Tensor = b, a: Tensor = a, s: float = scale, t: bool = transposed):
            return changed_stack((b, a), s, share, w, transposed=t)

        changes.append((module, end, merged))
    for module, end, merged in changes:
        weight = module.get_parameter(end)
        if isinstance(weight, StoredTensor):
            setattr(module, end, nn.Parameter(weight.mapped(merged)))
        else:
            weight.copy_(merged(weight))


def _require_shape(
    weight: Tensor, a: Tensor, b: Tensor, name: str, file: str, *, rank: int, transposed: bool
) -> None:
    outputs, inputs = weight.shape[-2:] if weight.ndim in (2, 3) else (0, 0)
    experts = weight.shape[0] if weight.ndim == 3 else 1
    if transposed:
        inputs, outputs = outputs, inputs
    if (*a.shape, *b.shape) != (experts * rank, inputs, outputs, experts * rank):
        raise UsageError(
            f"{file} changes {name} by A of shape {tuple(a.shape)} and B of shape "
            f"{tuple(b.shape)}, and in its base it has the shape {tuple(weight.shape)}: the "
            f"adapter is of another model or another rank than {rank}; correct its config"
        )
