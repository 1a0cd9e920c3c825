"""Models from Hugging Face directories or the hub, with our attention, without foreign code."""

import inspect
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from postgrad.core.errors import UsageError
from postgrad.core.hub import pretrained
from postgrad.models.attention import NAME
from postgrad.models.linear import speed_up
from postgrad.models.norm import fuse_norms
from postgrad.models.quantize import Quantize, loading_arguments
from postgrad.models.settings import ModelType, looks_local

TESTED = ", ".join(get_args(ModelType))
# Token mixers other than attention, by what their config is called or says: they keep a state along
# the sequence that our layouts would mix up between samples.
RECURRENT_LAYERS = ("linear_attention", "mamba", "recurrent", "conv", "ssm")
LAYER_KEYS = ("layer_types", "layers_block_type", "block_types")  # where configs say them
# What some types hand to the attention interface beside queries, keys and values (learned sinks,
# chosen keys, biases). Ours would leave it out and be wrong in silence.
FOREIGN_ARGUMENTS = re.compile(
    r"attention_interface\((?:[^()]|\([^()]*\))*\b"
    r"(s_aux|sinks|indices|block_indices|position_bias)="
)


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A causal language model on its device, its tokenizer and its config. source: where from."""

    lm: nn.Module
    tokenizer: Any
    config: Any
    source: str


def load_model(
    path: str,
    *,
    dtype: torch.dtype,
    device: torch.device | None = None,
    gradient_checkpointing: bool = False,
    quantize: Quantize = "none",
) -> LoadedModel:
    """The model of a directory or hub id, computing in `dtype`, dropout off.

    path: also "org/name@REVISION" (core.hub), here and in the other functions.
    Its attention is ours: `models.packed.hidden_states` runs it over layouts. Gradient
    checkpointing acts only in train mode, so such a model is left in it; others are in eval mode.
    quantize: see models.quantize, for a model that an adapter is put on. Raises UsageError for a
    path that holds no model, no tokenizer or no template, and for a model whose token mixers bypass
    the attention interface.
    """
    config = load_config(path)
    tokenizer = load_tokenizer(path)
    more = loading_arguments(quantize, device or torch.device("cpu"))
    lm, missing = read_weights(path, config, dtype, AutoModelForCausalLM, more)
    require_whole(path, missing=missing)
    place(lm, path, device, gradient_checkpointing=gradient_checkpointing)
    return LoadedModel(lm, tokenizer, config, path)


def place(lm: Any, path: str, device: torch.device | None, *, gradient_checkpointing: bool) -> None:
    """Puts a model that was read on its device, in the mode that load_model promises."""
    _refuse_foreign_attention(lm, path)
    if not getattr(lm, "is_quantized", False):  # in four bits it is where it was read to
        lm.to(device or torch.device("cpu"))
    speed_up(lm, device or torch.device("cpu"))
    fuse_norms(lm, device or torch.device("cpu"))
    if gradient_checkpointing:
        _checkpoint_activations(lm)
        lm.train()
    else:
        lm.eval()


def load_config(path: str) -> Any:
    """The model's config with every dropout at 0. Raises UsageError as load_model does, before a
    weight is read.
    """
    if looks_local(path) and not Path(path).is_dir():
        raise UsageError(f"no model at {path}: there is no such directory (model.path)")
    if (Path(path) / "adapter_config.json").is_file() and not (
        Path(path) / "config.json"
    ).is_file():
        raise UsageError(
            f"{path} is an adapter, not a model: export the run without --adapter, which merges it "
            "into its base"
        )
    name, at = pretrained(path)
    try:
        config: Any = AutoConfig.from_pretrained(name, trust_remote_code=False, **at)
    except (OSError, ValueError, KeyError, StrictDataclassError) as error:
        raise UsageError(
            f"no model at {path}: {error}; model.path is a directory with config.json, or a hub id"
        ) from error
    if getattr(config, "is_encoder_decoder", False):
        raise UsageError(
            f"{path} is a {config.model_type} model, an encoder with a decoder: only decoders "
            "that predict the next token are trained here"
        )
    if config.get_text_config() is not config:
        raise UsageError(
            f"{path} is a {config.model_type} model, which reads more than text: take the text "
            "model of the family"
        )
    _refuse_recurrent(config, path)
    for key, value in config.to_dict().items():
        if ("dropout" in key or key.endswith("pdrop")) and isinstance(value, float):
            setattr(config, key, 0.0)  # a mask drawn from a generator could not be resumed
    return config


def load_tokenizer(path: str) -> Any:
    """The tokenizer of a model, checked: a chat template, an end-of-sequence token, offsets."""
    if looks_local(path) and not Path(path).is_dir():
        raise UsageError(f"no tokenizer at {path}: there is no such directory (model.path)")
    name, at = pretrained(path)
    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(name, trust_remote_code=False, **at)
    except (OSError, ValueError, KeyError) as error:
        raise UsageError(
            f"no tokenizer at {path}: {error}; model.path is a directory with tokenizer.json, or a "
            "hub id"
        ) from error
    if not tokenizer.is_fast:
        raise UsageError(
            f"the tokenizer at {path} gives no offsets, from which loss masks are made: convert it "
            "to tokenizer.json"
        )
    if tokenizer.chat_template is None:
        raise UsageError(
            f"the tokenizer at {path} has no chat template: put chat_template.jinja there, or take "
            "the instruction-tuned model of the family"
        )
    if tokenizer.eos_token_id is None:
        raise UsageError(
            f"the tokenizer at {path} has no end-of-sequence token: no answer could end; set "
            "eos_token in tokenizer_config.json"
        )
    return tokenizer


def read_weights(
    path: str, config: Any, dtype: torch.dtype, kind: Any, more: Mapping[str, Any]
) -> tuple[Any, list[str]]:
    """The model of a directory as `kind`, an Auto class, and which weights were not there. more:
    other arguments of from_pretrained. Raises UsageError where it cannot be read or a weight has
    another shape.
    """
    name, at = pretrained(path)
    try:
        read: Any = kind.from_pretrained(
            name,
            config=config,
            dtype=dtype,
            attn_implementation=NAME,
            use_safetensors=True,
            trust_remote_code=False,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # so that they are named below
            **at,
            **more,
        )
    except (OSError, ValueError, ImportError, SafetensorError) as error:
        raise UsageError(
            f"the model {path} cannot be loaded: {error}; wanted are a config and weights as "
            "safetensors in the layout of Hugging Face"
        ) from error
    lm, found = read
    require_whole(path, mismatched=[name for name, *_ in found["mismatched_keys"]])
    return lm, list(found["missing_keys"])


def require_whole(
    path: str, *, missing: Sequence[str] = (), mismatched: Sequence[str] = ()
) -> None:
    """Raises UsageError for weights that transformers would draw at random with only a warning."""
    for what, names in {"missing": missing, "of another shape": mismatched}.items():
        if names:
            raise UsageError(
                f"the model {path} is not whole: {len(names)} weights are {what} "
                f"({', '.join(sorted(names)[:3])}); its config.json and its weights have to be of "
                "one model"
            )


def _refuse_recurrent(config: Any, path: str) -> None:
    kinds = [str(kind) for key in LAYER_KEYS for kind in getattr(config, key, None) or []]
    found = [kind for kind in kinds if any(word in kind for word in RECURRENT_LAYERS)]
    if found or not hasattr(config, "num_attention_heads"):
        what = f"{found[0]} layers" if found else "no attention heads"
        raise _refusal(config.model_type, path, what)


def _refuse_foreign_attention(lm: Any, path: str) -> None:
    """Every token mixer has to look up the attention interface; the source says whether it does."""
    decoder = inspect.getmodule(type(lm.get_decoder()))  # a score model has one too
    assert decoder is not None
    source = inspect.getsource(decoder)
    mixers = {
        type(module).__name__
        for name, module in lm.named_modules()
        if name.rpartition(".")[2]
        in ("linear_attn", "mamba", "mixer", "ssm", "conv", "temporal_block")
    }
    if "ALL_ATTENTION_FUNCTIONS" not in source or mixers:
        what = f"{', '.join(sorted(mixers))}" if mixers else "attention of its own"
        raise _refusal(lm.config.model_type, path, what)
    if foreign := FOREIGN_ARGUMENTS.search(source):
        raise UsageError(
            f"{path} is a {lm.config.model_type} model, whose attention takes {foreign[1]} beside "
            f"queries, keys and values: it would be left out here. Tested types: {TESTED}"
        )


def _refusal(model_type: str, path: str, what: str) -> UsageError:
    return UsageError(
        f"{path} is a {model_type} model with {what}, which bypasses transformers' attention "
        f"interface: samples packed into one forward would see each other. Tested types: {TESTED}"
    )


def _checkpoint_activations(lm: Any) -> None:
    # transformers 5.23 renamed it; the old name goes on to work in the versions before
    enable = (
        getattr(lm, "activation_checkpointing_enable", None) or lm.gradient_checkpointing_enable
    )
    try:
        enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    except TypeError:
        enable()
