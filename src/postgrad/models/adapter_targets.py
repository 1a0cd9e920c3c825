"""Where an adapter stands: linear layers, experts and routers by the ends of their names, and the
modules that train whole beside it.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn

from postgrad.core.errors import UsageError
from postgrad.models.adapter_mixtures import mixture_weights
from postgrad.models.adapter_parameters import ends_of
from postgrad.models.adapter_reader import HEAD
from postgrad.models.attention import carries_states, text_config
from postgrad.models.refusals import (
    no_dropout,
    no_linear_layers,
    no_part_of_mixtures,
    require_effect,
    tied_apart,
)
from postgrad.models.settings import EXPERTS, LINEAR, ROUTER, LoraSettings, is_target


def linear_layers(lm: nn.Module) -> dict[str, nn.Linear]:
    """The linear layers of a transformers model's decoder, which adapters stand on, by name."""
    decoder: Any = lm.get_decoder()  # pyright: ignore[reportCallIssue]
    prefix = next(name for name, module in lm.named_modules() if module is decoder)
    return {
        f"{prefix}.{name}": module
        for name, module in decoder.named_modules()
        if isinstance(module, nn.Linear)
    }


def target_layers(lm: nn.Module, settings: LoraSettings) -> list[str]:
    """Names of the linear layers that an adapter of these settings stands on, in the model's order;
    for experts and routers see `target_weights`.

    Raises UsageError for a target that names neither.
    """
    linear = [
        name.removesuffix(".base_layer") for name in linear_layers(lm) if ".lora_" not in name
    ]
    if carries_states(lm):
        from postgrad.models.states import weights_read_by

        if settings.dropout:
            raise no_dropout(lm.config.model_type)  # pyright: ignore[reportAttributeAccessIssue, reportArgumentType]
        split = {name: name.rpartition(".") for name in linear}
        linear = [
            name
            for name, (above, _, last) in split.items()
            if last not in weights_read_by(type(lm.get_submodule(above)))
        ]
    if not linear:
        raise no_linear_layers(lm.config.model_type)  # pyright: ignore[reportAttributeAccessIssue, reportArgumentType]
    weights = mixture_weights(lm)
    named = dict.fromkeys(linear, LINEAR) | weights
    for target in settings.targets:
        if not any(is_target(target, name, kind) for name, kind in named.items()):
            raise _unknown_target(lm, target, linear, weights)
    require_effect(settings, named, text_config(lm).num_hidden_layers)
    return [name for name in linear if settings.adapts(name)]


def target_weights(lm: Any, settings: LoraSettings) -> list[str]:
    """Names of the weights of experts and routers that an adapter of these settings stands on, in
    the model's order: those that its targets name.

    Raises UsageError for dropout, DoRA and PiSSA on them, which PEFT does not have either.
    """
    names = [name for name, kind in mixture_weights(lm).items() if settings.adapts(name, kind)]
    if names and settings.linear_alone:
        raise no_part_of_mixtures(settings.linear_alone[0], ends_of(names))
    return names


def _unknown_target(
    lm: Any, target: str, linear: Iterable[str], weights: Mapping[str, str]
) -> UsageError:
    kind, layers = lm.config.model_type, {name.rpartition(".")[2]: None for name in linear}
    stacked = {
        f"{EXPERTS}.{name.rpartition('.')[2]}": None
        for name, kind in weights.items()
        if kind == EXPERTS
    }
    if f"{EXPERTS}.{target}" in stacked:
        return UsageError(
            f"model.lora.targets: {target!r} is the weight of all experts of a layer in this "
            f'{kind} decoder: write "{EXPERTS}.{target}", or "{EXPERTS}" for all weights of experts'
        )
    routers = {ROUTER: None} if ROUTER in weights.values() else {}
    return UsageError(
        f"model.lora.targets: {target!r} is no linear layer of this {kind} decoder, which has "
        f"{', '.join({**layers, **stacked, **routers})}"
    )


def saved_modules(lm: Any, settings: LoraSettings) -> list[str]:
    """Names of the modules that train whole beside an adapter of these settings, in the model's
    order: its embeddings and its output head where they are named, and a `score` head always.

    Raises UsageError for a name of anything else, and where the model ties the two.
    """
    modules = lm.get_input_embeddings(), lm.get_output_embeddings(), getattr(lm, HEAD, None)
    names = {
        name: module
        for name, module in lm.named_modules()
        if any(module is other for other in modules)
    }
    wanted = {HEAD} if hasattr(lm, HEAD) else set[str]()
    for end in settings.modules_to_save:
        ended = {name for name in names if f".{name}".endswith(f".{end}")}
        if not ended:
            available = " and ".join(name.rpartition(".")[2] for name in names)
            raise UsageError(
                f"model.lora.modules_to_save: {end!r} is none of the modules of this "
                f"{lm.config.model_type} model that can train whole, which are {available}"
            )
        wanted |= ended
    weights = [names[name].weight for name in wanted]
    tied = modules[1] is not None and modules[0].weight is modules[1].weight
    if tied and any(weight is modules[0].weight for weight in weights):
        raise tied_apart()
    return [name for name in names if name in wanted]
