"""Adapters in PEFT's directories, read strictly and merged into the weights of their base."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from postgrad.core.errors import UsageError
from postgrad.models.files import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    adapter_base,
    adapter_config,
    require_regular,
)
from postgrad.models.settings import LoraSettings
from postgrad.models.stored import StoredTensor

HEAD = "score"  # a score model's head: small and fresh, so it trains whole beside the adapter
PREFIX = "base_model.model."  # what PEFT's files put before a name
HEAD_WEIGHT = f"{PREFIX}{HEAD}.weight"
LAYER = re.compile(rf"{re.escape(PREFIX)}(.+)\.lora_([AB])\.weight")
# Keys of PEFT's config that are read here, or that change nothing: any other one that is set asks
# for something that is not plain LoRA, and would be left out in silence.
READ = {
    "peft_type", "base_model_name_or_path", "task_type", "r", "lora_alpha", "lora_dropout",
    "target_modules", "modules_to_save", "bias", "init_lora_weights", "auto_mapping",
}  # fmt: skip
HARMLESS = {"peft_version", "inference_mode", "megatron_core", "qalora_group_size"}
FRESH = (True, False, "gaussian", "orthogonal", "eva")  # others change the base's weights too

FINITE_PART = 2**24  # numbers that are looked at in one go


@dataclass(frozen=True, slots=True)
class AdapterFile:
    """An adapter as it was read from its directory."""

    # A [rank, inputs] and B [outputs, rank] of each layer, and [1, hidden] of a score head, by
    # PEFT's names: "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
    weights: Mapping[str, Tensor]
    settings: LoraSettings
    base: str  # directory or hub id of the model that its config names

    @property
    def scores(self) -> bool:
        """True where it makes the base a critic or a reward model."""
        return HEAD_WEIGHT in self.weights


def read_adapter(path: str | Path) -> AdapterFile:
    """An adapter of PEFT's, from here or elsewhere. Nothing is unpickled, imported or downloaded.

    Raises UsageError where it is no plain LoRA of one rank, where weights are missing, misshapen or
    no finite numbers, and for weights that are not safetensors.
    """
    folder = Path(path)
    config = adapter_config(folder)
    _require_plain(config, folder)
    if not (folder / ADAPTER_WEIGHTS).is_file():
        pickled = (folder / "adapter_model.bin").exists()
        raise UsageError(
            f"{folder} has no {ADAPTER_WEIGHTS}"
            + (": adapter_model.bin is a pickle, and not read; convert it" if pickled else "")
        )
    require_regular(folder / ADAPTER_WEIGHTS)
    try:
        weights = load_file(folder / ADAPTER_WEIGHTS)
    except (OSError, SafetensorError) as error:
        raise UsageError(f"{folder / ADAPTER_WEIGHTS} cannot be read: {error}") from error
    _require_whole(weights, config.get("r"), folder / ADAPTER_WEIGHTS)
    try:
        settings = LoraSettings.model_validate(
            {
                "rank": config.get("r"),
                "alpha": config.get("lora_alpha"),
                "dropout": config.get("lora_dropout", 0.0),
                "targets": _targets(weights, config),
            }
        )
    except ValidationError as error:
        first = error.errors()[0]
        raise UsageError(f"{folder}/{ADAPTER_CONFIG}: {first['loc'][0]}: {first['msg']}") from error
    return AdapterFile(weights, settings, adapter_base(folder))


@torch.no_grad()
def merge_adapter(lm: nn.Module, adapter: AdapterFile, path: str) -> None:
    """Adds (alpha / rank) B A to the weights of `lm`, the adapter's base, in float32, and rounds
    each sum once to the dtype of `lm`. A score head takes the place of the one in `lm`, as float32.

    path: of the adapter, for messages. Raises UsageError, and changes nothing, where the adapter is
    of another model.
    """
    layers = linear_layers(lm)
    names = {match[1] for name in adapter.weights if (match := LAYER.fullmatch(name))}
    ends = tuple(f".{target}" for target in adapter.settings.targets)
    missing = sorted(name for name in layers if f".{name}".endswith(ends) and name not in names)
    if missing:
        raise UsageError(
            f"{path}/{ADAPTER_WEIGHTS} has no weights for {missing[0]} and {len(missing) - 1} "
            f"more layers that {ADAPTER_CONFIG} names: it is cut, or adapts layers of the same "
            "name in part; copy it again, or merge it into its base with PEFT"
        )
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
    scale = adapter.settings.alpha / adapter.settings.rank
    for name, factors in products.items():
        weight = layers[name].weight
        merged = partial(_merged, factors, scale)
        if isinstance(weight, StoredTensor):
            layers[name].weight = nn.Parameter(weight.mapped(merged))
        else:
            weight.copy_(merged(weight))
    if adapter.scores:
        _replace_head(lm, adapter, path)


def _merged(factors: tuple[Tensor, Tensor], scale: float, weight: Tensor) -> Tensor:
    """weight + scale * B A, in float32. factors: B and A."""
    b, a = (factor.float().to(weight.device) for factor in factors)
    return torch.addmm(weight.float(), b, a, alpha=scale)


def linear_layers(lm: nn.Module) -> dict[str, nn.Linear]:
    """The linear layers of a transformers model's decoder, which adapters stand on, by name."""
    decoder: Any = lm.get_decoder()  # pyright: ignore[reportCallIssue]
    prefix = next(name for name, module in lm.named_modules() if module is decoder)
    return {
        f"{prefix}.{name}": module
        for name, module in decoder.named_modules()
        if isinstance(module, nn.Linear)
    }


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


def _require_plain(config: Mapping[str, Any], folder: Path) -> None:
    saved, targets = config.get("modules_to_save") or [], config.get("target_modules") or []
    named = {"modules_to_save": saved, "target_modules": [] if targets == str(targets) else targets}
    for key, names in named.items():
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise UsageError(
                f"{folder}/{ADAPTER_CONFIG}: {key} is {names!r}; it has to be a list of names"
            )
    foreign = [key for key, value in config.items() if value and key not in READ | HARMLESS]
    wrong = {
        "peft_type": config.get("peft_type") != "LORA",
        "bias": config.get("bias", "none") != "none",
        "init_lora_weights": config.get("init_lora_weights", True) not in FRESH,
        "modules_to_save": not set(saved) <= {HEAD, "classifier"},
        # PEFT imports the module that it names
        "auto_mapping": not _of_transformers(config.get("auto_mapping")),
    }
    refused = [key for key in foreign if key != "revision"]
    refused += [key for key in wrong if wrong[key]]
    if refused:
        raise UsageError(
            f"{folder}/{ADAPTER_CONFIG} asks for {refused[0]} = {config.get(refused[0])!r}, which "
            "is not plain LoRA: merge it into its base with PEFT, and name the merged model"
        )


def _of_transformers(mapping: Any) -> bool:
    library = mapping.get("parent_library") if isinstance(mapping, dict) else "transformers."
    return mapping is None or str(library).startswith("transformers.")


def _targets(weights: Mapping[str, Tensor], config: Mapping[str, Any]) -> tuple[str, ...]:
    """As the config names them, where it has a list, without what the model has none of; a pattern
    or "all-linear" is replaced by the layers' names.
    """
    named = config.get("target_modules")
    if not isinstance(named, list):
        return last_names(weights)
    layers = [f".{match[1]}" for name in weights if (match := LAYER.fullmatch(name))]
    return tuple(t for t in sorted(named) if any(layer.endswith(f".{t}") for layer in layers))


def last_names(weights: Mapping[str, Tensor]) -> tuple[str, ...]:
    """("q_proj", "up_proj"): the last part of the name of every layer that has an A and a B."""
    layers = [match[1] for name in weights if (match := LAYER.fullmatch(name))]
    return tuple(dict.fromkeys(layer.rpartition(".")[2] for layer in layers))


def _require_whole(weights: Mapping[str, Tensor], rank: Any, file: Path) -> None:
    """Each target has A [rank, inputs] and B [outputs, rank] of finite numbers."""
    for name, tensor in weights.items():
        match = LAYER.fullmatch(name)
        if not match and name != HEAD_WEIGHT:
            raise UsageError(f"{file}: {name} is no weight of plain LoRA")
        if match:
            other = f"{PREFIX}{match[1]}.lora_{'B' if match[2] == 'A' else 'A'}.weight"
            if other not in weights:
                raise UsageError(f"{file}: {name} stands there without {other}")
            if tensor.ndim != 2 or tensor.shape[0 if match[2] == "A" else 1] != rank:
                shape = tuple(tensor.shape)
                raise UsageError(f"{file}: {name} has shape {shape}, which is not of rank {rank}")
        if not tensor.is_floating_point() or not _is_finite(tensor):
            raise UsageError(f"{file}: {name} holds values that are no finite numbers")
    if not any(LAYER.fullmatch(name) for name in weights):
        raise UsageError(f"{file} holds no adapter")


def _is_finite(tensor: Tensor) -> bool:
    """In parts: the file is mapped into memory, and may be larger than it."""
    return all(bool(part.isfinite().all()) for part in tensor.flatten().split(FINITE_PART))
