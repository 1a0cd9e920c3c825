"""Writes adapters as PEFT's directories, proved by PEFT, or merged into whole models."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForSequenceClassification, GenerationConfig

from postgrad.core.errors import RunError, UsageError
from postgrad.core.files import write_json
from postgrad.core.hub import pretrained, split_revision
from postgrad.models.adapter_mixtures import mixture_weights
from postgrad.models.adapter_parameters import ends_of
from postgrad.models.adapter_reader import HEAD, HEAD_WEIGHT, last_names, read_adapter
from postgrad.models.adapter_targets import target_layers, target_weights
from postgrad.models.adapters import Adapter, add_adapter
from postgrad.models.config import load_config, load_generation_config
from postgrad.models.end_tokens import with_ends
from postgrad.models.export import PROBE, TOLERANCE, export_hf
from postgrad.models.files import ADAPTER_CONFIG, ADAPTER_WEIGHTS, is_adapter
from postgrad.models.four_bits import Quantize
from postgrad.models.load import load_model, require_readable, skeleton
from postgrad.models.named_templates import with_template
from postgrad.models.save import save_model
from postgrad.models.score import RewardScale, load_score_model
from postgrad.models.settings import LINEAR, LoraSettings, is_target, longest_first
from postgrad.models.stored import StoredTensor, real
from postgrad.models.supported import causal_class, reads_images
from postgrad.models.tokenizer import load_tokenizer

# What PEFT leaves without an adapter: towers, whose layers have names of the decoder's, and
# projectors (models.images).
TOWERS = r"(.*\.)?(visual|vision_tower|vision_model|multi_modal_projector|connector)\..*"


def write_adapter(
    weights: Mapping[str, Tensor],
    settings: LoraSettings,
    base: str,
    to: Path,
    *,
    quantize: Quantize = "none",
    dtype: torch.dtype = torch.float32,
    overwrite: bool = False,
    chat_template: str = "",
    eos_token: Sequence[str] = (),
    card: str | None = None,
) -> None:
    """Writes an adapter as PEFT's directory, with the base's tokenizer. One of PiSSA becomes one of
    twice the rank, which changes the base as it is.

    weights: by the names of Adapter.parameters. base: the directory or hub id of the frozen model.
    quantize, dtype: what the adapter was trained on, see `merged_state`. chat_template, eos_token,
    card: see export_hf. `to` exists only after plain PEFT has read the files onto the base in
    float32 and given the same logits (or scores). Raises UsageError where `to` exists already,
    RunError where it cannot be written or the reload differs; nothing is left then.
    """
    if to.exists() and not (overwrite and to.is_dir()):
        raise UsageError(f"{to} already exists: choose another directory")
    if is_adapter(base):
        raise UsageError(
            f"--adapter: the run started from the adapter {base}, merged into its base, and an "
            "adapter alone would need a base that no file has: export without --adapter"
        )
    if settings.keeps_start:
        adapter = _on_base(base, weights, settings, quantize, dtype)
        weights, settings = adapter.plain_weights(), settings.plain()
    tokenizer = with_template(load_tokenizer(base), chat_template)
    generation = None
    if eos_token:
        generation = with_ends(load_generation_config(base), tokenizer, eos_token)
    save_model(
        _AdapterSaver(weights, settings, base, generation),
        tokenizer,
        to,
        check=lambda folder: _compare(weights, settings, base, tokenizer, folder),
        replace=overwrite,
        card=card,
    )


@torch.no_grad()
def merged_state(
    base: str,
    weights: Mapping[str, Tensor],
    settings: LoraSettings,
    *,
    quantize: Quantize = "none",
    dtype: torch.dtype = torch.float32,
) -> dict[str, Tensor]:
    """The base with the adapter merged into it, in float32 by hub name, as export_hf takes it.
    Unless it is in four bits, each weight is read, and merged, when it is needed. Raises RunError
    where the adapter is of another model.

    quantize, dtype: what the adapter was trained on: into a base in four bits, which were taken of
    weights in `dtype`, it is merged as they read, not into the weights that they came from. So it
    is where PiSSA began from weights in `dtype`.
    """
    adapter = _on_base(base, weights, settings, quantize, dtype)
    state = dict(adapter.frozen())
    for name, tensor in adapter.merged():
        if name in state and not isinstance(tensor, StoredTensor):
            state[name].copy_(tensor)
        else:  # also the score head, which the base has none of
            state[name] = tensor
    return state


def _on_base(
    base: str,
    weights: Mapping[str, Tensor],
    settings: LoraSettings,
    quantize: Quantize,
    dtype: torch.dtype,
) -> Adapter:
    """The adapter on its base, read as `merged_state` says."""
    load = load_score_model if HEAD_WEIGHT in weights else load_model
    plain = quantize == "none" and not settings.keeps_start
    read_in = torch.float32 if plain else dtype
    model = load(base, dtype=read_in, quantize=quantize, in_files=True, images=True)
    adapter = add_adapter(model.lm, settings, seed=0)
    adapter.load(weights)
    return adapter


def export_merged(adapter: Path, to: Path) -> None:
    """Writes the base of an adapter with the adapter merged into it, as export_hf does: in float32,
    rounded to the base's dtype.

    Of a reward model the scale of its scores is not in the adapter: it is written as mean 0 and
    standard deviation 1.
    """
    scores = read_adapter(adapter).scores
    load = load_score_model if scores else load_model
    model = load(str(adapter), dtype=torch.float32, in_files=True, images=True)
    stored = model.config.dtype  # None where config.json says nothing
    export_hf(
        dict(model.lm.named_parameters()),
        str(adapter),
        to,
        dtype=stored if isinstance(stored, torch.dtype) else torch.float32,
        scale=RewardScale() if scores else None,
    )


@dataclass(frozen=True, slots=True)
class _AdapterSaver:
    """An adapter with the method save_pretrained, by which save_model writes it like a model."""

    weights: Mapping[str, Tensor]
    settings: LoraSettings
    base: str
    generation: GenerationConfig | None  # None: the base's

    def save_pretrained(self, folder: Path) -> None:
        import peft

        scores, saved = HEAD_WEIGHT in self.weights, self.settings.modules_to_save
        name, revision = split_revision(self.base)
        modules, parameters, patterns = self._placed()
        config: dict[str, Any] = peft.LoraConfig(
            r=self.settings.rank,
            lora_alpha=self.settings.alpha,
            rank_pattern=patterns[0],
            alpha_pattern=patterns[1],
            use_rslora=self.settings.rslora,
            use_dora=self.settings.dora,
            lora_dropout=self.settings.dropout,
            target_modules=modules,
            exclude_modules=TOWERS if reads_images(load_config(self.base)) else None,
            target_parameters=parameters or None,
            modules_to_save=sorted({*saved, *([HEAD] if scores else [])}) or None,
            task_type=peft.TaskType.SEQ_CLS if scores else peft.TaskType.CAUSAL_LM,
            # absolute: PEFT would take a relative one that is not there for a hub id
            base_model_name_or_path=str(Path(self.base).resolve())
            if Path(self.base).is_dir()
            else name,
            revision=revision,
            inference_mode=True,
        ).to_dict()
        config["target_modules"] = sorted(config["target_modules"])
        write_json(folder / ADAPTER_CONFIG, dict(sorted(config.items())))
        tensors = {n: real(t).detach().float().cpu() for n, t in self.weights.items()}
        tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}
        if self.generation is not None:
            self.generation.save_pretrained(folder)
        save_file(tensors, folder / ADAPTER_WEIGHTS, metadata={"format": "pt"})

    def _placed(self) -> tuple[list[str], list[str], list[dict[str, int]]]:
        """PEFT's target_modules, target_parameters, and its patterns of ranks and alphas. Where
        layers of a target have no adapter, those that have one are named whole, one by one.
        """
        settings = self.settings
        config = load_config(self.base)
        lm = skeleton(config, causal_class(config), self.base)
        linear, weights = target_layers(lm, settings), target_weights(lm, settings)
        names = dict.fromkeys(linear, LINEAR) | {n: mixture_weights(lm)[n] for n in weights}
        patterns = [
            _pefts_pattern(pattern, names)
            for pattern in (settings.rank_pattern, settings.alpha_pattern)
        ]
        if settings.exclude_modules or settings.layers_to_transform:
            return linear, weights, patterns
        modules = [t for t in settings.targets if any(is_target(t, n, LINEAR) for n in linear)]
        if not settings.targets:
            modules = list(last_names(self.weights))
        return modules, ends_of(weights), patterns


def _pefts_pattern(pattern: Mapping[str, int], names: Mapping[str, str]) -> dict[str, int]:
    """A pattern as PEFT reads it, which knows weights of experts and routers by their own names
    alone. names: of what has an adapter, with its kind.
    """
    ours: dict[str, int] = {}
    for end, value in longest_first(pattern).items():
        if any(is_target(end, name, LINEAR) for name, kind in names.items() if kind == LINEAR):
            ours[end] = value
        for name, kind in names.items():
            if kind != LINEAR and is_target(end, name, kind):
                ours.setdefault(name, value)
    return ours


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
    kind: Any = causal_class(config)
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
