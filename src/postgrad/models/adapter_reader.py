"""Adapters in PEFT's directories, read strictly."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from postgrad.core.errors import UsageError
from postgrad.core.untrusted import shown
from postgrad.models.adapter_parameters import as_targets, is_of_parameter
from postgrad.models.files import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    adapter_base,
    adapter_config,
    require_readable,
)
from postgrad.models.settings import LoraSettings

HEAD = "score"  # a score model's head: small and fresh, so it trains whole beside the adapter
PREFIX = "base_model.model."  # what PEFT's files put before a name
HEAD_WEIGHT = f"{PREFIX}{HEAD}.weight"
LAYER = re.compile(rf"{re.escape(PREFIX)}(.+)\.lora_([AB])\.weight")
MAGNITUDE = re.compile(rf"{re.escape(PREFIX)}(.+)\.lora_magnitude_vector(?:\.weight)?")  # DoRA
# Keys of PEFT's config that are read here, or that change nothing: any other one that is set asks
# for something that is not plain LoRA, and would be left out in silence.
READ = {
    "peft_type", "base_model_name_or_path", "task_type", "r", "lora_alpha", "lora_dropout",
    "target_modules", "modules_to_save", "bias", "init_lora_weights", "auto_mapping", "use_rslora",
    "use_dora", "rank_pattern", "alpha_pattern", "target_parameters", "exclude_modules",
    "layers_to_transform", "layers_pattern",
}  # fmt: skip
HARMLESS = {
    "peft_version", "inference_mode", "megatron_core", "qalora_group_size",
}  # fmt: skip
FRESH = (True, False, "gaussian", "orthogonal", "eva")  # others change the base's weights too

PLAIN_NAME = re.compile(r"\w+(\.\w+)*", re.ASCII)
NO_LAYERS_PATTERN = (None, "", [], "layers", ["layers"])  # PEFT's names of the list of layers
FINITE_PART = 2**24  # numbers that are looked at in one go


@dataclass(frozen=True, slots=True)
class AdapterFile:
    """An adapter as it was read from its directory."""

    # A [rank, inputs] and B [outputs, rank] of each layer, [1, hidden] of a score head, with DoRA a
    # magnitude [outputs], and whole weights of modules_to_save, by PEFT's names:
    # "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
    weights: Mapping[str, Tensor]
    settings: LoraSettings
    magnitudes: Mapping[str, Tensor]  # by layer, of DoRA: [outputs] the lengths of W's rows
    saved: Mapping[str, Tensor]  # by name in the base: weights that were trained whole
    parameters: tuple[str, ...]  # weights of experts and routers, by the ends of their names
    base: str  # directory or hub id of the model that its config names

    @property
    def scores(self) -> bool:
        """True where it makes the base a critic or a reward model."""
        return HEAD_WEIGHT in self.weights


def read_adapter(path: str | Path) -> AdapterFile:
    """An adapter of PEFT's, from here or elsewhere: LoRA, rsLoRA (Kalajdzievski 2023,
    arXiv:2312.03732) or DoRA (Liu et al. 2024, arXiv:2402.09353), also with modules that were
    trained whole. Nothing is unpickled, imported or downloaded.

    Raises UsageError for other adapters, where weights are missing, misshapen or no finite numbers,
    and for weights that are not safetensors.
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
    require_readable(folder / ADAPTER_WEIGHTS)
    try:
        weights = load_file(folder / ADAPTER_WEIGHTS)
    except (OSError, SafetensorError) as error:
        raise UsageError(f"{folder / ADAPTER_WEIGHTS} cannot be read: {error}") from error
    settings = _settings(weights, config, folder)
    _require_whole(weights, settings, config, folder / ADAPTER_WEIGHTS)
    magnitudes = {
        match[1]: tensor for name, tensor in weights.items() if (match := MAGNITUDE.fullmatch(name))
    }
    trained_whole = {
        name.removeprefix(PREFIX): tensor
        for name, tensor in weights.items()
        if ".lora_" not in name and name != HEAD_WEIGHT
    }
    named, base = tuple(config.get("target_parameters") or ()), adapter_base(folder)
    return AdapterFile(weights, settings, magnitudes, trained_whole, named, base)


def _settings(
    weights: Mapping[str, Tensor], config: Mapping[str, Any], folder: Path
) -> LoraSettings:
    try:
        return LoraSettings.model_validate(
            {
                "rank": config.get("r"),
                "alpha": config.get("lora_alpha"),
                "rslora": config.get("use_rslora", False),
                "dora": config.get("use_dora", False),
                "dropout": config.get("lora_dropout", 0.0),
                "targets": _targets(weights, config),
                "rank_pattern": _pattern(config, "rank_pattern", folder),
                "alpha_pattern": _pattern(config, "alpha_pattern", folder),
                "layers_to_transform": _layers(config),
                "exclude_modules": _excluded(config),
            }
        )
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        raise UsageError(f"{folder}/{ADAPTER_CONFIG}: {place}: {first['msg']}") from error


def _require_plain(config: Mapping[str, Any], folder: Path) -> None:
    saved, targets = config.get("modules_to_save") or [], config.get("target_modules") or []
    named = {
        "modules_to_save": saved,
        "target_modules": [] if targets == str(targets) else targets,
        "target_parameters": config.get("target_parameters") or [],
    }
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
        # PEFT imports the module that it names
        "auto_mapping": not _of_transformers(config.get("auto_mapping")),
        "layers_pattern": config.get("layers_pattern") not in NO_LAYERS_PATTERN,
    }
    refused = [key for key in foreign if key != "revision"]
    refused += [key for key in wrong if wrong[key]]
    if refused:
        raise UsageError(
            f"{folder}/{ADAPTER_CONFIG} asks for {refused[0]} = {config.get(refused[0])!r}, which "
            "is not read here: merge it into its base with PEFT, and name the merged model"
        )


def _of_transformers(mapping: Any) -> bool:
    library = mapping.get("parent_library") if isinstance(mapping, dict) else "transformers."
    return mapping is None or str(library).startswith("transformers.")


def _targets(weights: Mapping[str, Tensor], config: Mapping[str, Any]) -> tuple[str, ...]:
    """As the config names them, where it has a list, without what the model has none of; a pattern
    or "all-linear" is replaced by the layers' names. After them target_parameters.
    """
    named, parameters = config.get("target_modules"), config.get("target_parameters") or ()
    layers = [match[1] for name in weights if (match := LAYER.fullmatch(name))]
    layers = [f".{layer}" for layer in layers if not is_of_parameter(layer, parameters)]
    if isinstance(named, list):
        linear = [t for t in sorted(named) if any(layer.endswith(f".{t}") for layer in layers)]
    else:
        linear = [layer.rpartition(".")[2] for layer in layers]
    return tuple(dict.fromkeys([*linear, *as_targets(parameters)]))


def last_names(weights: Mapping[str, Tensor]) -> tuple[str, ...]:
    """("q_proj", "up_proj"): the last part of the name of every layer that has an A and a B."""
    layers = [match[1] for name in weights if (match := LAYER.fullmatch(name))]
    return tuple(dict.fromkeys(layer.rpartition(".")[2] for layer in layers))


def _require_whole(
    weights: Mapping[str, Tensor], settings: LoraSettings, config: Mapping[str, Any], file: Path
) -> None:
    """Each target has A [rank, inputs] and B [outputs, rank] of finite numbers, with DoRA also a
    magnitude [outputs]. Ranks of experts and routers that a pattern may change are seen once their
    base is read: patterns name weights, which the file does not.
    """
    saved = config.get("modules_to_save") or []
    for name, tensor in weights.items():
        match = LAYER.fullmatch(name)
        if not match and not MAGNITUDE.fullmatch(name) and not _is_saved(name, saved):
            raise UsageError(f"{file}: {name} is no weight of plain LoRA")
        if match:
            other = f"{PREFIX}{match[1]}.lora_{'B' if match[2] == 'A' else 'A'}.weight"
            if other not in weights:
                raise UsageError(f"{file}: {name} has no {other}")
            rank = settings.rank_of(match[1])
            stacked = is_of_parameter(match[1], config.get("target_parameters") or ())
            each = 1 if settings.rank_pattern else rank
            rows = tensor.shape[0 if match[2] == "A" else -1] if tensor.ndim == 2 else 0
            if not rows or (rows % each if stacked else rows != rank):
                shape = tuple(tensor.shape)
                raise UsageError(f"{file}: {name} has shape {shape}, which is not of rank {rank}")
        if not tensor.is_floating_point() or not _is_finite(tensor):
            raise UsageError(f"{file}: {name} holds values that are no finite numbers")
    layers = {match[1]: t for name, t in weights.items() if (match := LAYER.fullmatch(name))}
    if not layers:
        raise UsageError(f"{file} holds no adapter")
    for module in set(saved) - {HEAD, "classifier"}:  # those PEFT names for every score model
        if not any(_is_saved(name, [module]) and name != HEAD_WEIGHT for name in weights):
            raise UsageError(f"{file} has no weights of {module}, which modules_to_save names")
    lengths = {m[1]: t.shape for name, t in weights.items() if (m := MAGNITUDE.fullmatch(name))}
    if lengths or config.get("use_dora"):
        wanted = {n: weights[f"{PREFIX}{n}.lora_B.weight"].shape[:1] for n in layers}
        if lengths != wanted:
            name = next(n for n in {**wanted, **lengths} if lengths.get(n) != wanted.get(n))
            raise UsageError(
                f"{file}: DoRA has one magnitude for each output of each layer, and {name} has not"
            )


def _is_saved(name: str, saved: Sequence[str]) -> bool:
    """Whether a weight is of a module in modules_to_save."""
    owner = name.removeprefix(PREFIX).rpartition(".")[0]
    return name == HEAD_WEIGHT or any(f".{owner}".endswith(f".{module}") for module in saved)


def _pattern(config: Mapping[str, Any], key: str, folder: Path) -> dict[str, Any]:
    """A table of PEFT's, in which the first name that ends a layer's holds, without names that
    never do. Raises UsageError for a regular expression: those of a stranger may take for ever.
    """
    table = config.get(key) or {}
    if not isinstance(table, dict):
        raise UsageError(f"{folder / ADAPTER_CONFIG}: {key} is {shown(table)}, and no table")
    pattern: dict[str, Any] = {}
    for name, value in table.items():
        if not PLAIN_NAME.fullmatch(str(name)):
            raise UsageError(
                f"{folder / ADAPTER_CONFIG}: {key} has the pattern {shown(name)}, and only "
                "names of layers are read: merge it into its base with PEFT"
            )
        if not any(f".{name}".endswith(f".{earlier}") for earlier in pattern):
            pattern[name] = value
    return pattern


def _layers(config: Mapping[str, Any]) -> Any:
    layers = config.get("layers_to_transform")
    layers = [] if layers is None else layers
    return tuple(layers) if isinstance(layers, list) else (layers,)


def _excluded(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Of the layers without an adapter those that are named: the weights show all of them."""
    named = config.get("exclude_modules")
    names = [str(name) for name in named] if isinstance(named, list) else []
    return tuple(dict.fromkeys(name for name in names if PLAIN_NAME.fullmatch(name)))


def _is_finite(tensor: Tensor) -> bool:
    """In parts: the file is mapped into memory, and may be larger than it."""
    return all(bool(part.isfinite().all()) for part in tensor.flatten().split(FINITE_PART))
