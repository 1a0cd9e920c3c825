"""Loads models from Hugging Face directories or the hub, with our attention, without foreign code.

Every command loads through here. Files are checked before a library reads them (models.files,
models.headers), and any error that a library raises over them becomes one UsageError.
"""

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForSequenceClassification, AutoModelForTokenClassification
from transformers.utils.hub import cached_file, cached_files

from postgrad.core.errors import UsageError
from postgrad.core.hub import pretrained
from postgrad.models import files
from postgrad.models.adapter_merge import merge_adapter
from postgrad.models.adapter_reader import HEAD, read_adapter
from postgrad.models.attention import carries_states, carry_context, implementation_of
from postgrad.models.config import load_config, reading
from postgrad.models.decoder import move_together
from postgrad.models.four_bits import Quantize, loading_arguments
from postgrad.models.headers import read_headers, require_fit, require_whole
from postgrad.models.linear import fuse_norms, speed_up
from postgrad.models.mxfp4 import mxfp4_weights, unpacked_mxfp4
from postgrad.models.probe import require_same_outputs
from postgrad.models.recompute import recompute_activations
from postgrad.models.rope import hold_frequencies
from postgrad.models.settings import Recompute
from postgrad.models.stored import of_tensors, real, realise, stored_tensors
from postgrad.models.supported import (
    causal_class,
    experts_of,
    give_score_class,
    is_tested,
    may_carry_states,
    require_interface,
    require_writer,
)
from postgrad.models.tokenizer import load_tokenizer
from postgrad.parallel.ranks import ALONE, Ranks


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A causal language model, or a score model, on its device."""

    lm: nn.Module
    tokenizer: Any  # a fast tokenizer of transformers
    config: Any  # transformers' config, every dropout at 0
    source: str  # directory or hub id that it was loaded from: "org/name@REVISION"
    drawn_head: bool = False  # of a score model: its files have no head


@dataclass(frozen=True, slots=True)
class Loading:
    """How weights are read: see load_model."""

    dtype: torch.dtype
    device: torch.device
    quantize: Quantize = "none"
    ranks: Ranks = ALONE
    in_files: bool = False
    together: bool = False

    @property
    def stored(self) -> bool:
        """Whether weights stay in their files until somebody needs them."""
        return (self.in_files or self.ranks.size > 1) and self.quantize == "none"


def load_model(
    path: str,
    *,
    dtype: torch.dtype,
    device: torch.device | None = None,
    gradient_checkpointing: Recompute = False,
    quantize: Quantize = "none",
    together: bool = False,
    ranks: Ranks = ALONE,
    in_files: bool = False,
    images: bool = False,
) -> LoadedModel:
    """The model of a directory or hub id, computing in `dtype`, dropout off.

    path: also "org/name@REVISION" (core.hub), or the directory of a PEFT adapter, which is merged
    into its base (models.adapter_merge), here and in the other functions. quantize: "4bit" holds
    the matrices of the layers so, for a model that gets an adapter. together: the weights are in
    one piece of memory (models.decoder.move_together). ranks: those that will divide the model. If
    there are several, its weights stay in their files (models.stored) until Backbone.divide takes
    this rank's part; those in four bits do not. in_files: True does so in one process too.
    images: whether the caller trains models that read images too; others refuse them.
    The model attends with our attention, so `hidden_states` can run it over layouts. It is in eval
    mode; with gradient checkpointing, which acts in train mode alone, in that.
    Raises UsageError for a path without a model or tokenizer, for files that are damaged or not
    safetensors, and for a model whose outputs here are not those of transformers.
    """
    config = load_config(path)
    require_writer(config, path, images=images)
    tokenizer = load_tokenizer(path)
    how = Loading(dtype, device or torch.device("cpu"), quantize, ranks, in_files, together)
    lm, missing = read_weights(path, config, causal_class(config), how)
    require_whole(path, missing=missing)
    place(lm, path, how, gradient_checkpointing=gradient_checkpointing)
    return LoadedModel(lm, tokenizer, config, path)


def place(lm: Any, path: str, how: "Loading", *, gradient_checkpointing: Recompute) -> None:
    """Moves a model to its device, swaps in our faster layers, and sets its mode as load_model
    says. A model of an untested type is probed there (models.probe), by the first rank alone.
    """
    if how.stored:  # stored weights are of their device already
        for module in lm.modules():
            for name, buffer in module._buffers.items():
                module._buffers[name] = None if buffer is None else real(buffer).to(how.device)
    elif how.together and how.quantize == "none":
        move_together(lm, how.device)
    else:
        lm.to(how.device)
    speed_up(lm, how.device)
    fuse_norms(lm, how.device)
    hold_frequencies(lm, path)
    lm.eval()
    if may_carry_states(lm.config):
        from postgrad.models.states import carry_states  # of types without states nothing is read

        carry_states(lm)
    if not is_tested(lm.config) and not carries_states(lm):
        carry_context(lm)
    if how.ranks.rank == 0 and not is_tested(lm.config):
        require_same_outputs(lm, path)
    if gradient_checkpointing:
        recompute_activations(lm.train(), gradient_checkpointing)


def read_weights(path: str, config: Any, kind: Any, how: Loading) -> tuple[Any, list[str]]:
    """The model as `kind`, an Auto class, and the names of weights that its files lack.

    Raises UsageError where the files cannot be read or a weight has another shape than its config
    says.
    """
    if files.is_adapter(path):
        return _read_merged(path, config, kind, how)
    meta = require_readable(path, config, kind)
    require_interface(meta, path)
    wanted = "it takes a config and weights as safetensors in the layout of Hugging Face"
    attention = implementation_of(config)
    name, at = pretrained(path)
    with reading(f"the model {path} cannot be loaded", wanted):
        packed = bool(mxfp4_weights(read_headers(weight_files(path))))
        if packed and how.quantize != "none":
            raise UsageError(
                f"model.quantize: {path} has experts in MXFP4, which are read as {how.dtype}, and "
                "the experts of a mixture are not held in four bits here; leave it out"
            )
        if how.stored or packed:
            weights = unpacked_mxfp4(stored_tensors(weight_files(path), how.device))
            read: Any = of_tensors(type(meta), config, how.dtype, weights, attention)
            if not how.stored:
                realise(read[0])
        else:
            read = kind.from_pretrained(
                name,
                config=config,
                dtype=how.dtype,
                attn_implementation=attention,
                use_safetensors=True,
                trust_remote_code=False,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # so that they are named below
                **at,
                **loading_arguments(how.quantize, how.device),
            )
            if how.quantize == "none" and experts_of(config):
                _leave_files(read[0])
    lm, report = read
    require_whole(path, mismatched=[name for name, *_ in report["mismatched_keys"]])
    return lm, list(report["missing_keys"])


def _leave_files(lm: nn.Module) -> None:
    """Copies the weights of a mixture but for those of experts, which were copied as they were put
    together. A single weight that still lies in its file keeps all of it in the process's memory.
    """
    for name, weight in lm.named_parameters():
        if ".experts." not in name:
            weight.data = weight.data.clone()


def _read_merged(path: str, config: Any, kind: Any, how: Loading) -> tuple[Any, list[str]]:
    """As read_weights, of an adapter's directory."""
    if how.quantize != "none":
        raise UsageError(
            f"model.quantize: {path} is an adapter, which cannot be merged into weights of four "
            f"bits; write the merged model first (postgrad export {path} --to MODEL), and name it"
        )
    adapter = read_adapter(path)
    lm, missing = read_weights(files.weights_source(path), config, kind, how)
    merge_adapter(lm, adapter, path)
    return lm, [name for name in missing if not (adapter.scores and name == f"{HEAD}.weight")]


def require_readable(path: str, config: Any, kind: Any) -> Any:
    """The model on the meta device (`skeleton`). Raises UsageError, before a weight is read or
    memory taken for one, where its files are not safetensors or do not fit its config.
    """
    path = files.weights_source(path)
    files.has_generation(Path(path))  # transformers reads it with the weights
    headers = read_headers(weight_files(path))
    layers = getattr(config.get_text_config(), "num_hidden_layers", 0)
    if layers > len(headers):
        raise UsageError(
            f"{path}/{files.CONFIG}: num_hidden_layers is {layers}, and the files hold "
            f"{len(headers)} weights in all: they are not of one model"
        )
    meta = skeleton(config, kind, path)
    require_fit(meta, headers, path)
    return meta


def skeleton(config: Any, kind: Any, path: str) -> Any:
    """The model of a config as `kind`, an Auto class, on the meta device: shapes without memory.
    Raises UsageError where transformers cannot make one.
    """
    if kind in (AutoModelForSequenceClassification, AutoModelForTokenClassification):
        give_score_class(config, kind)
    problem = f"transformers makes no model of {path}/{files.CONFIG}"
    with reading(problem, "take the config.json that belongs to the weights"), torch.device("meta"):
        return kind.from_config(copy.deepcopy(config))


def weight_files(path: str) -> list[Path]:
    """The safetensors files of a directory, or of a hub id, which are fetched."""
    if Path(path).is_dir():
        return files.weight_files(Path(path))
    name, at = pretrained(path)
    quiet = {"_raise_exceptions_for_missing_entries": False, **at}
    with reading(f"no model at {path}", "a hub id needs the network, or files fetched before"):
        if single := cached_file(name, files.WEIGHTS, **quiet):
            return [Path(single)]
        index = cached_file(name, files.INDEX, **quiet)
        if index is None:
            raise UsageError(
                f"no model at {path}: it has neither {files.WEIGHTS} nor {files.INDEX}, and "
                f"nothing else is read; {files.CONVERT}"
            )
        shards = cached_files(name, files.shard_names(Path(index)), **at)
    return [Path(file) for file in shards or ()]
