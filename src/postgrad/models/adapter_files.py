"""Adapters as PEFT's directories: written and checked by a reload, read strictly, merged into their
base.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from postgrad.core.errors import RunError, UsageError
from postgrad.core.files import write_json
from postgrad.core.hub import REVISION, at_revision, pretrained, split_revision
from postgrad.models.adapters import HEAD, PREFIX, add_adapter
from postgrad.models.export import PROBE, TOLERANCE
from postgrad.models.files import read_object, require_regular
from postgrad.models.load import load_config, load_model, load_tokenizer, require_readable
from postgrad.models.named_templates import with_template
from postgrad.models.save import save_model
from postgrad.models.score import load_score_model
from postgrad.models.settings import LoraSettings

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
HEAD_WEIGHT = f"{PREFIX}{HEAD}.weight"
LAYER = re.compile(rf"{re.escape(PREFIX)}(.+)\.lora_([AB])\.weight")
# Keys of PEFT's config that are read here, and (HARMLESS) those that change nothing. Any other key
# that is set asks for something beyond plain LoRA, which would silently be left out.
READ = {
    "peft_type", "base_model_name_or_path", "task_type", "r", "lora_alpha", "lora_dropout",
    "target_modules", "modules_to_save", "bias", "init_lora_weights", "auto_mapping",
}  # fmt: skip
HARMLESS = {"peft_version", "inference_mode", "megatron_core", "qalora_group_size"}
# init_lora_weights that leave the base's weights as they are.
FRESH = (True, False, "gaussian", "orthogonal", "eva")


@dataclass(frozen=True, slots=True)
class AdapterFile:
    """An adapter as read from a directory."""

    weights: Mapping[str, Tensor]  # by PEFT's names, see Adapter.parameters
    settings: LoraSettings
    base: str  # directory or hub id of the frozen model, as adapter_config.json names it

    @property
    def scores(self) -> bool:
        """True where it has a score head: with it the base is a critic or a reward model."""
        return HEAD_WEIGHT in self.weights


def is_adapter(path: str | Path) -> bool:
    """True for a directory with a PEFT adapter."""
    return (Path(path) / CONFIG).is_file()


def base_of(path: str | Path) -> str:
    """The directory or hub id of the model that an adapter stands on, as its config names it.

    With the revision of an id ("org/name@REVISION"). Raises UsageError where it names none.
    """
    config = _config(Path(path))
    base = config.get("base_model_name_or_path")
    if not isinstance(base, str) or not base:
        raise UsageError(f"{path}/{CONFIG} names no base model (base_model_name_or_path)")
    revision = config.get("revision")
    if Path(base).is_dir() or revision in (None, "main"):  # PEFT writes no revision of a directory
        return base
    if not isinstance(revision, str) or not re.fullmatch(REVISION, revision):
        raise UsageError(f"{path}/{CONFIG}: revision = {revision!r} is no branch, tag or commit")
    return at_revision(base, revision)


def read_adapter(path: str | Path) -> AdapterFile:
    """Reads a PEFT adapter, also one trained elsewhere. Nothing is unpickled, imported or
    downloaded.

    Raises UsageError where it is not plain LoRA of one rank, where weights are missing, of a wrong
    shape or not finite, and where they are not safetensors.
    """
    folder = Path(path)
    config = _config(folder)
    _require_plain(config, folder)
    if not (folder / WEIGHTS).is_file():
        pickled = (folder / "adapter_model.bin").exists()
        raise UsageError(
            f"{folder} has no {WEIGHTS}"
            + (": adapter_model.bin is a pickle, and not read; convert it" if pickled else "")
        )
    require_regular(folder / WEIGHTS)
    try:
        weights = load_file(folder / WEIGHTS)
    except (OSError, SafetensorError) as error:
        raise UsageError(f"{folder / WEIGHTS} cannot be read: {error}") from error
    _require_whole(weights, config.get("r"), folder / WEIGHTS)
    try:
        settings = LoraSettings(
            rank=config.get("r"),  # pyright: ignore[reportArgumentType]
            alpha=config.get("lora_alpha"),  # pyright: ignore[reportArgumentType]
            dropout=config.get("lora_dropout", 0.0),
            targets=_targets(weights, config),
        )
    except ValidationError as error:
        first = error.errors()[0]
        raise UsageError(f"{folder}/{CONFIG}: {first['loc'][0]}: {first['msg']}") from error
    return AdapterFile(weights, settings, base_of(folder))


def write_adapter(
    weights: Mapping[str, Tensor],
    settings: LoraSettings,
    base: str,
    to: Path,
    *,
    overwrite: bool = False,
    chat_template: str = "",
    card: str | None = None,
) -> None:
    """Writes an adapter as PEFT's directory, with the base's tokenizer.

    weights: by the names of Adapter.parameters. base: the directory or hub id of the frozen model.
    chat_template, card: see export_hf. `to` exists only after plain PEFT has read the files onto
    the base in float32 and given the same logits (or scores). Raises UsageError where `to` exists
    already, RunError where it cannot be written or the reload differs; nothing is left then.
    """
    if to.exists() and not (overwrite and to.is_dir()):
        raise UsageError(f"{to} is there already: choose another --to")
    tokenizer = with_template(load_tokenizer(base), chat_template)
    save_model(
        _AdapterSaver(weights, settings, base),
        tokenizer,
        to,
        check=lambda folder: _compare(weights, settings, base, tokenizer, folder),
        replace=overwrite,
        card=card,
    )


@torch.no_grad()
def merged_state(
    base: str, weights: Mapping[str, Tensor], settings: LoraSettings
) -> dict[str, Tensor]:
    """The base with the adapter merged into it, in float32 by hub name, as export_hf takes it. One
    matrix is merged at a time. Raises RunError where the adapter is of another model.
    """
    load = load_score_model if HEAD_WEIGHT in weights else load_model
    adapter = add_adapter(load(base, dtype=torch.float32).lm, settings, seed=0)
    adapter.load(weights)
    state = dict(adapter.frozen())
    for name, tensor in adapter.merged():
        if name in state:
            state[name].copy_(tensor)
        else:  # the score head, which the base has none of
            state[name] = tensor
    return state


@dataclass(frozen=True, slots=True)
class _AdapterSaver:
    """An adapter with the method save_pretrained, by which save_model writes it like a model."""

    weights: Mapping[str, Tensor]
    settings: LoraSettings
    base: str

    def save_pretrained(self, folder: Path) -> None:
        import peft

        scores = HEAD_WEIGHT in self.weights
        name, revision = split_revision(self.base)
        config: dict[str, Any] = peft.LoraConfig(
            r=self.settings.rank,
            lora_alpha=self.settings.alpha,
            lora_dropout=self.settings.dropout,
            target_modules=list(self.settings.targets or _last_names(self.weights)),
            modules_to_save=[HEAD] if scores else None,
            task_type=peft.TaskType.SEQ_CLS if scores else peft.TaskType.CAUSAL_LM,
            # absolute: PEFT would take a relative one that is not there for a hub id
            base_model_name_or_path=str(Path(self.base).resolve())
            if Path(self.base).is_dir()
            else name,
            revision=revision,
            inference_mode=True,
        ).to_dict()
        config["target_modules"] = sorted(config["target_modules"])
        write_json(folder / CONFIG, dict(sorted(config.items())))
        tensors = {n: t.detach().float().cpu().contiguous() for n, t in self.weights.items()}
        save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})


@torch.no_grad()
def _compare(
    weights: Mapping[str, Tensor],
    settings: LoraSettings,
    base: str,
    tokenizer: Any,
    written: Path,
) -> None:
    """Raises RunError where plain transformers and PEFT compute other logits from the written files
    than we from `weights`, on the same base.
    """
    import peft

    config = load_config(base)
    kind: Any = AutoModelForCausalLM
    if HEAD_WEIGHT in weights:
        kind, config.num_labels = AutoModelForSequenceClassification, 1
    require_readable(base, config, kind)
    batch = torch.tensor([tokenizer(PROBE, add_special_tokens=False)["input_ids"]])
    name, at = pretrained(base)
    with torch.random.fork_rng(devices=[]):  # PEFT draws weights before it reads them
        lm: Any = kind.from_pretrained(
            name, config=config, dtype=torch.float32, use_safetensors=True, **at
        )
        read: Any = peft.PeftModel.from_pretrained(lm, str(written))
    peft_logits = read(batch).logits
    lm = read.unload()
    add_adapter(lm, settings, seed=0, name="written").load(weights)
    difference = float((lm(batch).logits - peft_logits).abs().max())
    if not difference <= TOLERANCE:
        raise RunError(
            f"export: the adapter read back from {written} gives other logits (by {difference:.3g})"
        )


def _config(folder: Path) -> dict[str, Any]:
    try:
        return read_object(folder / CONFIG)
    except UsageError as error:
        raise UsageError(f"no adapter at {folder}: {error}") from error


def _require_plain(config: Mapping[str, Any], folder: Path) -> None:
    saved, targets = config.get("modules_to_save") or [], config.get("target_modules") or []
    named = {"modules_to_save": saved, "target_modules": [] if targets == str(targets) else targets}
    for key, names in named.items():
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise UsageError(f"{folder}/{CONFIG}: {key} is {names!r}; it has to be a list of names")
    foreign = [key for key, value in config.items() if value and key not in READ | HARMLESS]
    wrong = {
        "peft_type": config.get("peft_type") != "LORA",
        "bias": config.get("bias", "none") != "none",
        "init_lora_weights": config.get("init_lora_weights", True) not in FRESH,
        "modules_to_save": not set(saved) <= {HEAD, "classifier"},
        # PEFT imports the module that it names
        "auto_mapping": not _is_of_transformers(config.get("auto_mapping")),
    }
    unsupported = [key for key in foreign if key != "revision"]
    unsupported += [key for key in wrong if wrong[key]]
    if unsupported:
        key = unsupported[0]
        raise UsageError(
            f"{folder}/{CONFIG} asks for {key} = {config.get(key)!r}, which is not plain LoRA: "
            "merge it into its base with PEFT, and name the merged model"
        )


def _is_of_transformers(mapping: Any) -> bool:
    library = mapping.get("parent_library") if isinstance(mapping, dict) else "transformers."
    return mapping is None or str(library).startswith("transformers.")


def _targets(weights: Mapping[str, Tensor], config: Mapping[str, Any]) -> tuple[str, ...]:
    """The target_modules of the config that name a layer of `weights`; where the config has a
    pattern or "all-linear", the last parts of all layers' names.
    """
    named = config.get("target_modules")
    if not isinstance(named, list):
        return _last_names(weights)
    layers = [f".{match[1]}" for name in weights if (match := LAYER.fullmatch(name))]
    return tuple(t for t in sorted(named) if any(layer.endswith(f".{t}") for layer in layers))


def _last_names(weights: Mapping[str, Tensor]) -> tuple[str, ...]:
    layers = [match[1] for name in weights if (match := LAYER.fullmatch(name))]
    return tuple(dict.fromkeys(layer.rpartition(".")[2] for layer in layers))


def _require_whole(weights: Mapping[str, Tensor], rank: Any, file: Path) -> None:
    """Each target has A [rank, inputs] and B [outputs, rank] of finite numbers."""
    for name, tensor in weights.items():
        match = LAYER.fullmatch(name)
        if not match and name != HEAD_WEIGHT:
            raise UsageError(f"{file}: {name} is no weight of plain LoRA")
        if match:
            partner = f"{PREFIX}{match[1]}.lora_{'B' if match[2] == 'A' else 'A'}.weight"
            if partner not in weights:
                raise UsageError(f"{file}: {name} stands there without {partner}")
            if tensor.ndim != 2 or tensor.shape[0 if match[2] == "A" else 1] != rank:
                shape = tuple(tensor.shape)
                raise UsageError(f"{file}: {name} has shape {shape}, which is not of rank {rank}")
        if not tensor.is_floating_point() or not bool(tensor.isfinite().all()):
            raise UsageError(f"{file}: {name} holds values that are no finite numbers")
    if not any(LAYER.fullmatch(name) for name in weights):
        raise UsageError(f"{file} holds no adapter")
