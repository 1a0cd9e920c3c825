"""Refuses models that cannot run here, by their config and code; models.probe finds the others.

Samples are packed into one forward and attend through transformers' attention interface. A token
mixer that bypasses the interface would let samples see each other, and ours would ignore arguments
beside queries, keys and values.
"""

import inspect
import re
from typing import Any, get_args

from transformers.activations import ACT2FN
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from postgrad.core.errors import UsageError
from postgrad.core.text import nearest
from postgrad.models.attention import layers_of
from postgrad.models.config_check import REMEDY, rope_tables
from postgrad.models.files import CONFIG
from postgrad.models.settings import ModelType

TESTED = ", ".join(get_args(ModelType))
# Words in the names of layers that keep a state along the sequence, which samples of one layout
# would share.
RECURRENT_LAYERS = ("linear_attention", "mamba", "recurrent", "conv", "ssm")
LAYER_KEYS = ("layer_types", "layers_block_type", "block_types")  # where configs say them
# Kinds of attention that differ only by their mask; ours gets no mask.
MASKED_LAYERS = ("chunked_attention",)
MIXERS = ("linear_attn", "mamba", "mixer", "ssm", "conv", "temporal_block")
# Arguments that some types pass to the attention interface beside queries, keys and values (learned
# sinks, chosen keys, biases). Ours would silently ignore them.
FOREIGN_ARGUMENTS = re.compile(
    r"attention_interface\((?:[^()]|\([^()]*\))*\b"
    r"(s_aux|sinks|indices|block_indices|position_bias)="
)
ACTIVATIONS = ("hidden_act", "hidden_activation", "activation_function")


def is_tested(config: Any) -> bool:
    """True for the types whose logits, gradients and samples tests compare with transformers'."""
    return config.model_type.removesuffix("_text") in get_args(ModelType)


def require_supported(config: Any, path: str) -> None:
    """Raises UsageError for a config that transformers has a model for, but that cannot be trained
    here.
    """
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
    kinds = [str(kind) for key in LAYER_KEYS for kind in getattr(config, key, None) or []]
    recurrent = [kind for kind in kinds if any(word in kind for word in RECURRENT_LAYERS)]
    if recurrent or not hasattr(config, "num_attention_heads"):
        feature = f"{recurrent[0]} layers" if recurrent else "no attention heads"
        raise refusal(config.model_type, path, feature)
    if masked := [kind for kind in kinds if kind in MASKED_LAYERS]:
        raise refusal(config.model_type, path, f"{masked[0]} layers")
    ahead = [key for key in ("use_bidirectional_attention",) if getattr(config, key, False) is True]
    if getattr(config, "is_causal", True) is False:
        ahead.append("is_causal")
    if ahead:
        raise UsageError(
            f"{path}/{CONFIG}: {ahead[0]} is {getattr(config, ahead[0])}: its tokens see those "
            "after them, and only models that predict the next token are trained here"
        )
    _require_names(config, path)


def require_interface(lm: Any, path: str) -> None:
    """Raises UsageError where a model's source code does not look up the attention interface, or
    passes it arguments that ours does not take.
    """
    kind = lm.config.model_type
    decoder = getattr(lm, "get_decoder", lambda: None)()  # a score model has one too
    module = None if decoder is None else inspect.getmodule(type(decoder))
    if module is None or decoder is lm:
        raise UsageError(
            f"{path} is a {kind} model, which is not supported because its decoder is not a module "
            f"apart from its output head. Tested types: {TESTED}"
        )
    layers_of(lm)
    source = inspect.getsource(module)
    mixers = {
        type(inner).__name__
        for name, inner in lm.named_modules()
        if name.rpartition(".")[2] in MIXERS
    }
    if "ALL_ATTENTION_FUNCTIONS" not in source or mixers:
        feature = f"{', '.join(sorted(mixers))}" if mixers else "attention of its own"
        raise refusal(kind, path, feature)
    if foreign := FOREIGN_ARGUMENTS.search(source):
        raise UsageError(
            f"{path} is a {kind} model, whose attention takes {foreign[1]} beside queries, keys "
            f"and values: it would be left out here. Tested types: {TESTED}"
        )


def refusal(model_type: str, path: str, feature: str) -> UsageError:
    """The error for a model with a `feature` ("mamba layers") that bypasses our attention."""
    return UsageError(
        f"{path} is a {model_type} model with {feature}, which bypasses transformers' attention "
        f"interface: samples packed into one forward would see each other. Tested types: {TESTED}"
    )


def experts_of(config: Any) -> int:
    """How many experts a layer of a mixture has; 0 of a dense model."""
    counts = (
        getattr(config, key, None)
        for key in ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
    )
    most = max((count for count in counts if isinstance(count, int)), default=0)
    return most if most > 1 else 0


def _require_names(config: Any, path: str) -> None:
    """Raises UsageError for an activation or a rope_type that transformers does not have."""
    for key in ACTIVATIONS:
        name = getattr(config, key, None)
        if isinstance(name, str) and name not in ACT2FN:
            raise UsageError(_unknown(f"{path}/{CONFIG}: {key}", name, list(ACT2FN)))
    rotations = ["default", *ROPE_INIT_FUNCTIONS]
    for table in rope_tables(getattr(config, "rope_parameters", None)):
        name = table.get("rope_type", "default")
        if name not in rotations:
            where = f"{path}/{CONFIG}: rope_type"
            raise UsageError(_unknown(where, str(name), rotations))


def _unknown(where: str, name: str, names: list[str]) -> str:
    near = nearest(name, names)
    hint = f"did you mean {near}?" if near else f"there are {', '.join(sorted(names))}"
    return f"{where} is {name!r}, which transformers does not have: {hint} Else {REMEDY}"
