"""Checks the values of a config.json: their types, and sizes that a model can have.

transformers checks some of them, each model type in its own way and mostly while it builds layers:
a width of 10^9 has taken the machine's memory by then. Free of torch, so that plans use it too.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from postgrad.core.errors import UsageError

REMEDY = "take the config.json that belongs to the weights"
WIDTHS = (
    "hidden_size", "intermediate_size", "moe_intermediate_size", "head_dim", "num_attention_heads",
    "num_key_value_heads", "n_embd", "n_head", "n_inner", "ffn_dim", "ffn_hidden_size", "d_model",
    "num_experts", "num_local_experts", "n_routed_experts", "num_experts_per_tok", "rotary_dim",
    "q_lora_rank", "kv_lora_rank", "v_head_dim", "qk_rope_head_dim", "word_embed_proj_dim",
    "shared_expert_intermediate_size",
)  # fmt: skip
LIMITS = {
    **dict.fromkeys(WIDTHS, 2**20),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "num_layers", "n_layers"), 10_000),
    "vocab_size": 2**24,
    **dict.fromkeys(("max_position_embeddings", "n_positions", "sliding_window"), 2**31),
}
NEVER_ZERO = (
    "hidden_size", "intermediate_size", "head_dim", "num_attention_heads", "num_key_value_heads",
    "n_embd", "n_head", "d_model", "num_hidden_layers", "n_layer", "num_layers", "n_layers",
    "vocab_size", "max_position_embeddings", "n_positions",
)  # fmt: skip
POSITIVE = (
    "rope_theta", "final_logit_softcapping", "attn_logit_softcapping", "query_pre_attn_scalar",
    "partial_rotary_factor", "logits_scaling",
)  # fmt: skip
NOT_NEGATIVE = (
    "rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_eps", "initializer_range",
    "attention_dropout", "hidden_dropout", "embd_pdrop", "attn_pdrop", "resid_pdrop",
)  # fmt: skip
FLAGS = (
    "tie_word_embeddings", "attention_bias", "mlp_bias", "use_sliding_window",
    "is_encoder_decoder", "use_cache",
)  # fmt: skip
TEXTS = ("hidden_act", "hidden_activation", "activation_function", "dtype", "torch_dtype")
NAMES = ("architectures", "layer_types", "layers_block_type", "block_types")  # lists of texts
DTYPES = ("auto", "float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2")


def require_config(config: Mapping[str, Any], file: str | Path) -> None:
    """Raises UsageError for the first key of a config.json whose value no model can have.

    file: its name in messages. Keys that are absent or null stand for the model type's default.
    """
    for key, value in config.items():
        if value is not None and (wanted := _wanted(key, value)):
            raise UsageError(f"{file}: {key} is {_shown(value)}; it has to be {wanted}: {REMEDY}")
    if not isinstance(config.get("model_type"), str):
        raise UsageError(
            f"{file} names no model_type, or one that is not a text: it is not the config.json of "
            f"a model; {REMEDY}"
        )
    _require_groups(config, file)
    for key in ("rope_parameters", "rope_scaling"):
        _require_rope(config.get(key), f"{file}: {key}")
    if config.get("transformers_weights") is not None:
        raise UsageError(
            f"{file}: transformers_weights names another file for the weights, "
            f"{_shown(config['transformers_weights'])}: rename it to model.safetensors, and remove "
            "the key"
        )


def rope_tables(value: Any) -> Iterator[Mapping[str, Any]]:
    """The tables in rope_parameters or rope_scaling: one, or one for each kind of layer."""
    if isinstance(value, Mapping):
        inner = [each for each in value.values() if isinstance(each, Mapping)]
        yield from inner or [value]


def _wanted(key: str, value: Any) -> str | None:
    """What the value of a key has to be ("a number above 0"); None where `value` is allowed."""
    if key in LIMITS:
        least = 1 if key in NEVER_ZERO else 0
        several = value if isinstance(value, list) else [value]
        fits = all(_is_whole(each) and least <= each <= LIMITS[key] for each in several)
        return None if fits else f"a whole number from {least} to {LIMITS[key]}"
    rules: tuple[tuple[tuple[str, ...], Callable[[Any], bool], str], ...] = (
        (POSITIVE, lambda x: _is_number(x) and x > 0, "a number above 0"),
        (NOT_NEGATIVE, lambda x: _is_number(x) and x >= 0, "a number, 0 or more"),
        (FLAGS, lambda x: isinstance(x, bool), "true or false"),
        (TEXTS, lambda x: isinstance(x, str), "a text"),
        (NAMES, _are_texts, "a list of texts"),
    )
    for keys, right, text in rules:
        if key in keys and not right(value):
            return text
    if key in ("dtype", "torch_dtype") and value.removeprefix("torch.") not in DTYPES:
        return " or ".join(DTYPES[1:5])
    return None


def _require_groups(config: Mapping[str, Any], file: str | Path) -> None:
    heads, groups = config.get("num_attention_heads"), config.get("num_key_value_heads")
    if isinstance(heads, int) and isinstance(groups, int) and groups and heads % groups:
        raise UsageError(
            f"{file}: num_attention_heads is {heads}, which num_key_value_heads, {groups}, does "
            f"not divide: {REMEDY}"
        )


def _require_rope(value: Any, where: str) -> None:
    if value is None:
        return
    if not isinstance(value, Mapping):
        raise UsageError(f"{where} is {_shown(value)}; it has to be an object: {REMEDY}")
    for table in rope_tables(value):
        for key, setting in table.items():
            shown = f"{where}.{key} is {_shown(setting)}"
            if key in ("rope_type", "type") and not isinstance(setting, str):
                raise UsageError(f"{shown}; it has to be a text: {REMEDY}")
            number = key.endswith(("factor", "theta")) or key.startswith(("beta_", "original_max"))
            texts = key in ("short_factor", "long_factor")
            fits = _are_numbers(setting) if texts else _is_number(setting) and float(setting) >= 0
            if setting is not None and (number or texts) and not fits:
                wanted = "a list of numbers" if texts else "a number, 0 or more"
                raise UsageError(f"{shown}; it has to be {wanted}: {REMEDY}")


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return abs(value) < 1e300 and math.isfinite(value)


def _are_numbers(value: Any) -> bool:
    return isinstance(value, list) and all(map(_is_number, value))


def _are_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(text, str) for text in value)


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:40]}..."
