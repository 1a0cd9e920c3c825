"""Refuses models that cannot run here, by their config and code; models.probe finds the others.

Samples are packed into one forward and attend through transformers' attention interface. A token
mixer that bypasses the interface would let samples see each other, and ours would ignore arguments
beside queries, keys and values. types.toml has the outcome for every type of transformers, and why
a type is refused; tests/contracts/test_model_types.py holds it to the truth.
"""

import inspect
import re
import tomllib
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from typing import Any, Literal, get_args

from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForTokenClassification,
)
from transformers.activations import ACT2FN
from transformers.conversion_mapping import (
    get_checkpoint_conversion_mapping,
    register_checkpoint_conversion_mapping,
)
from transformers.modeling_layers import (
    GenericForSequenceClassification,
    GenericForTokenClassification,
)
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from postgrad.core.errors import UsageError
from postgrad.core.text import nearest
from postgrad.models.attention import layers_of
from postgrad.models.config_check import REMEDY, rope_tables
from postgrad.models.files import CONFIG
from postgrad.models.settings import IMAGE_TYPES, TOWERS, ModelType

RefusalReason = Literal[
    "images", "media", "encoder", "state", "attention", "arguments", "mask", "layers", "outputs"
]  # the tables of types.toml
LAYER_KEYS = ("layer_types", "layers_block_type", "block_types")  # where configs say them
# Kinds of attention that differ only by their mask; ours gets no mask.
MASKED_LAYERS = ("chunked_attention",)
STATE_LAYERS = "linear_attention"  # what configs call gated delta rules
# Names of modules that carry a state along the sequence.
MIXERS = ("linear_attn", "mamba", "mixer", "ssm", "conv", "temporal_block")
# Arguments that some types pass to the attention interface beside queries, keys and values (chosen
# keys, biases, sinks of each query). Ours would silently ignore them; it takes a head's (s_aux).
FOREIGN_ARGUMENTS = re.compile(
    r"attention_interface\((?:[^()]|\([^()]*\))*\b"
    r"(sinks|indices|block_indices|position_bias)="
)
# What DeepSeek-V4 names the bias of the keys that it appends to those of the tokens: ours gets the
# keys, and no mask that says who sees them.
APPENDED_KEYS = re.compile(r"\b(block_bias)\b")
RANDOM_KEYS = ("dropout", "pdrop", "jitter")  # of config.json: shares of what is drawn anew
ACTIVATIONS = ("hidden_act", "hidden_activation", "activation_function")


class UnsupportedModel(UsageError):
    """A model that cannot be trained here, for one of the reasons of types.toml."""

    def __init__(self, message: str, reason: RefusalReason) -> None:
        super().__init__(message)
        self.reason = reason


@cache
def refused_types() -> Mapping[str, Any]:
    """types.toml: for each reason {"because": the end of a sentence, "types": names}; "works" is
    the list of types that run.
    """
    return tomllib.loads(files("postgrad.models").joinpath("types.toml").read_text("utf-8"))


def unsupported(
    model_type: str, path: str, reason: RefusalReason, detail: str = ""
) -> UnsupportedModel:
    """The error for a model that cannot run here. detail: what it is in this model."""
    because = refused_types()[reason]["because"]
    shown = f" ({detail})" if detail else ""
    return UnsupportedModel(
        f"{path} is a {model_type} model, which is not supported because {because}{shown}. "
        "docs/models.md lists the types that run",
        reason,
    )


def is_tested(config: Any) -> bool:
    """True for the types whose logits, gradients and samples need no probe when they are loaded."""
    kind = config.model_type
    return kind in IMAGE_TYPES or kind.removesuffix("_text") in get_args(ModelType)


def may_carry_states(config: Any) -> bool:
    """Whether a model is to be searched for layers that carry a state: those of tested types are
    known by their configs.
    """
    kinds = getattr(config.get_text_config(), LAYER_KEYS[0], None) or []
    return not is_tested(config) or STATE_LAYERS in kinds


def reads_images(config: Any) -> bool:
    """Whether a model reads images beside text, and can be trained here."""
    return config.model_type in IMAGE_TYPES


def without_dropout(config: Any) -> None:
    """Sets every dropout of a config and its parts to 0."""
    for part in [config, *(getattr(config, name) for name in config.sub_configs)]:
        for key, value in part.to_dict().items() if part is not None else ():
            if any(word in key for word in RANDOM_KEYS) and isinstance(value, float):
                setattr(part, key, 0.0)  # a mask drawn from a generator could not be resumed


def require_text_model(config: Any, path: str, *, images: bool = False) -> None:
    """Raises UnsupportedModel for a model that reads images, unless `images` are read too."""
    if reads_images(config) and not images:
        raise unsupported(config.model_type, path, "images")


def require_writer(config: Any, path: str, *, images: bool = False) -> None:
    """As require_text_model; raises UsageError for a model that scores texts too. With tied
    embeddings its files have all weights of one that writes, and nobody would notice.
    """
    require_text_model(config, path, images=images)
    if re.search("For(Sequence|Token)Classification$", (config.architectures or [""])[0]):
        raise UsageError(
            f"{path} is a reward model or a critic ({config.architectures[0]}), which scores texts "
            "and writes none: name the model that it was trained from, or serve it with postgrad "
            "serve-reward"
        )


def causal_class(config: Any) -> Any:
    """The Auto class of transformers for a policy."""
    return AutoModelForImageTextToText if reads_images(config) else AutoModelForCausalLM


def require_supported(config: Any, path: str) -> None:
    """Raises UsageError for a config that transformers has a model for, but that cannot be trained
    here.
    """
    kind = config.model_type
    if getattr(config, "is_encoder_decoder", False):
        raise unsupported(kind, path, "encoder")
    parts = [part for part in config.sub_configs if "vision" in part or "audio" in part]
    text = config.get_text_config()
    if text is not config or parts:
        if kind not in IMAGE_TYPES:
            raise unsupported(kind, path, "media")
        tower = config.vision_config.model_type
        if text.model_type not in IMAGE_TYPES[kind] or tower not in TOWERS.get(kind, (tower,)):
            parts = f"with a tower of type {tower} and a decoder of type {text.model_type}"
            raise unsupported(kind, path, "media", parts)
        config = text  # what follows is about the decoder
    kinds = [str(kind) for key in LAYER_KEYS for kind in getattr(config, key, None) or []]
    if kind in refused_types()["state"]["types"]:
        raise unsupported(kind, path, "state")
    if config.sub_configs and not hasattr(config, "num_attention_heads"):
        raise unsupported(kind, path, "layers")
    if masked := [kind for kind in kinds if kind in MASKED_LAYERS]:
        raise unsupported(kind, path, "mask", f"{masked[0]} layers")
    if getattr(config, "alibi", False) is True:
        raise unsupported(kind, path, "attention", "alibi, a bias on positions")
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
        raise unsupported(kind, path, "layers", "its decoder is not apart from its output head")
    source = inspect.getsource(module)
    mixers = _mixers(lm, path)
    if "ALL_ATTENTION_FUNCTIONS" not in source and not mixers:
        raise unsupported(kind, path, "attention")
    if foreign := FOREIGN_ARGUMENTS.search(source) or APPENDED_KEYS.search(source):
        raise unsupported(kind, path, "arguments", foreign[1])
    if hasattr(decoder, "encoder"):
        raise unsupported(kind, path, "encoder")
    try:
        layers_of(lm)
    except LookupError as error:
        raise unsupported(kind, path, "layers", str(error)) from error


def _mixers(lm: Any, path: str) -> bool:
    """Whether a model has token mixers that carry a state. Raises UsageError where they keep it in
    another way than transformers' cache.
    """
    if not may_carry_states(lm.config):
        return False
    from postgrad.models.states import keeps_state  # of no type that formulas know

    if any(keeps_state(type(module)) for module in lm.modules()):
        return True
    names = {name.rpartition(".")[2] for name, _ in lm.named_modules()}
    if unknown := sorted(names.intersection(MIXERS)):
        raise unsupported(lm.config.model_type, path, "state", ", ".join(unknown))
    return False


def give_score_class(config: Any, auto: Any) -> None:
    """Registers a model for classification of the config's type with transformers, in this process,
    where it has none: the type's decoder with transformers' own generic `score` head. auto: the
    Auto class, for sequence or for token classification.
    """
    of_tokens = auto is AutoModelForTokenClassification
    generic: Any = GenericForTokenClassification if of_tokens else GenericForSequenceClassification
    score_classes: Any = MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING
    if of_tokens:
        score_classes = MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING
    kind = type(config)
    of_kind: Any = MODEL_FOR_CAUSAL_LM_MAPPING
    if config.model_type in IMAGE_TYPES:
        of_kind = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    if kind in score_classes or kind not in of_kind:
        return
    causal: Any = of_kind[kind]
    of_type = next(base for base in causal.__mro__ if base.__name__.endswith("PreTrainedModel"))
    ending = generic.__name__.removeprefix("Generic")
    name = f"{of_type.__name__.removesuffix('PreTrainedModel')}{ending}"
    bases = (generic, of_type)
    members = {
        "base_model_prefix": of_type.base_model_prefix,
        "config_class": kind,
        "__module__": causal.__module__,
    }
    # where files name weights otherwise than the model (Qwen2.5-VL), by the name of the class
    if names := get_checkpoint_conversion_mapping(causal.__name__):
        register_checkpoint_conversion_mapping(name, names, overwrite=True)
    model_class = type(name, bases, members)
    # exist_ok: without it transformers passes over configs of its own in silence
    auto.register(kind, model_class, exist_ok=True)
    if kind not in score_classes:  # transformers 5.17 passes over them in any case
        score_classes._extra_content[kind] = model_class


def experts_of(config: Any) -> int:
    """How many experts a layer of a mixture has; 0 of a dense model."""
    text = config.get_text_config()
    counts = (
        getattr(text, key, None)
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
