"""Tiny models of every causal type that transformers has, with a tokenizer beside them."""

import shutil
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from postgrad.core.errors import UsageError
from postgrad.models.supported import require_supported, require_text_model

WIDTH, LAYERS, HEADS = 32, 2, 4
SIZES: dict[str, Any] = {
    "hidden_size": WIDTH, "n_embd": WIDTH, "d_model": WIDTH, "word_embed_proj_dim": WIDTH,
    "intermediate_size": 48, "n_inner": 48, "ffn_dim": 48, "ffn_hidden_size": 48,
    "intermediate_size_mlp": 48, "num_hidden_layers": LAYERS, "n_layer": LAYERS,
    "num_layers": LAYERS, "n_layers": LAYERS, "num_attention_heads": HEADS, "n_head": HEADS,
    "n_heads": HEADS, "num_key_value_heads": 2, "head_dim": 8, "rotary_dim": 4,
    "max_position_embeddings": 128, "n_positions": 128, "sliding_window": 8,
    "initializer_range": 0.2, "moe_intermediate_size": 16, "num_experts": 4,
    "num_local_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2,
    "moe_num_experts": 4, "moe_k": 2, "moe_topk": 2, "n_shared_experts": 1,
    "shared_expert_intermediate_size": 16, "expert_ffn_hidden_size": 16, "first_k_dense_replace": 1,
    "n_group": 1, "topk_group": 1, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8, "qk_head_dim": 16, "v_head_dim": 8, "dim_model_base": WIDTH,
    "hidden_size_per_layer_input": 8, "num_kv_shared_layers": 0, "laurel_rank": 4,
    "is_decoder": True,
}  # fmt: skip
# Keys that a type cannot do without, or cannot have, beside them.
ALL_HEADS = {"num_key_value_heads": HEADS}
ROPE = {"rope_type": "default", "rope_theta": 1e4}
# Hybrids: a layer of each kind, and chunks that are shorter than the sequences of the contract.
LINEAR = {"layer_types": ["linear_attention", "full_attention"]}
CONV = {"layer_types": ["conv", "full_attention"]}
DELTA = {
    **LINEAR, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}  # fmt: skip
MAMBA = {**LINEAR, "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_chunk_size": 8}
ZAMBA = {"num_hidden_layers": 3, "layers_block_type": ["hybrid", "linear_attention", "hybrid"]}
MORE: dict[str, dict[str, Any]] = {
    "deepseek_v2": ALL_HEADS,
    "deepseek_v3": ALL_HEADS,
    "glm4_moe_lite": ALL_HEADS,
    "minicpm3": ALL_HEADS,
    # with a padding token transformers clears its embedding whenever it loads the model
    "youtu": {**ALL_HEADS, "pad_token_id": None},
    "axk1": ALL_HEADS,
    "sarvam_mla": ALL_HEADS,
    "inkling2_text": {"unpadded_vocab_size": 90},
    "inkling2_loop_text": {"unpadded_vocab_size": 90},
    "dots3_note_text": ALL_HEADS,
    "zaya": {"num_experts_per_tok": 1},
    "bamba": {**MAMBA, "attn_layer_indices": [1]},
    "granitemoehybrid": MAMBA,
    "falcon_h1": {**MAMBA, "mamba_d_ssm": 64, "mamba_rms_norm": True},
    "mamba2": {"num_heads": 8, "n_groups": 1, "state_size": 8, "chunk_size": 8},
    "nemotron_h": {
        "ssm_state_size": 8,
        "mamba_num_heads": 8,
        "mamba_head_dim": 8,
        "n_groups": 2,
        "chunk_size": 8,
        "moe_shared_expert_intermediate_size": 16,
    },
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "qwen3_next": DELTA,
    "qwen3_5_text": DELTA,
    "qwen3_5_moe_text": DELTA,
    "qwen4_exp_text": {
        **DELTA,
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 8,
        "indexer_budget": 8,
        "indexer_compress_ratio": 2,
    },
    "kimi_linear": {**LINEAR, **ALL_HEADS, "linear_head_dim": 8, "linear_num_heads": 4},
    "bailing_hybrid": {**LINEAR, **ALL_HEADS},
    "lfm3": CONV,
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "window_size": 8},
    "reformer": {"attn_layers": ["local", "lsh"], "axial_pos_embds_dim": (8, 24)},
    "roc_bert": {"shape_vocab_size": 90, "pronunciation_vocab_size": 90},
    "zamba": {**ZAMBA, **ALL_HEADS},
    "zamba2": {**ZAMBA, **ALL_HEADS, "chunk_size": 8, "mamba_d_state": 8},
    "gpt_bigcode": {"num_key_value_heads": 1},
    "cohere_compass_text": {
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": dict.fromkeys(("sliding_attention", "full_attention"), ROPE),
    },
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8},
        "ffn_config": {"hidden_size": WIDTH, "ffn_hidden_size": 48, "moe_top_k": 2},
        "max_seq_len": 128,
    },
    "lfm2": CONV,
    "lfm2_moe": CONV,
}

# Types with weights of experts that an adapter may stand on; the routers of ROUTED_BY_LINEAR are
# linear layers, which adapters stand on by their own names.
MIXTURES = (
    "afmoe", "aria_text", "axk1", "bailing_hybrid", "cohere2_moe", "deepseek_v2", "deepseek_v3",
    "dots1", "ernie4_5_moe", "exaone_moe", "flex_olmo", "glm4_moe", "glm4_moe_lite", "gpt_oss",
    "granitemoe", "granitemoe_swa", "granitemoehybrid", "granitemoeshared", "hunyuan_v1_moe",
    "hy_v3", "jamba", "kimi_linear", "kolibri1", "laguna", "lara_mini", "mellum", "mimo_v2_flash",
    "minimax", "minimax_m2", "mixtral", "nemotron_h", "olmoe", "qwen2_moe", "qwen3_5_moe_text",
    "qwen3_moe", "qwen3_next", "sarvam_mla", "sarvam_moe", "solar_open",
)  # fmt: skip
ROUTED_BY_LINEAR = ("afmoe", "hunyuan_v1_moe")
# Keys without which transformers makes no config of a type at all.
FIRST: dict[str, dict[str, Any]] = {
    "gemma4_assistant": {
        "text_config": {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0}
    },
}
LARGEST = 5_000_000  # weights of a tiny model: a size that SIZES does not name is told, not made


def config_of(kind: str, vocabulary: int) -> Any:
    """A config of a type with small sizes, those that it has a key for."""
    plain = AutoConfig.for_model(kind, **FIRST.get(kind, {}))
    known_sizes = plain.to_dict()
    names = getattr(plain, "attribute_map", {})
    sizes = {**SIZES, **MORE.get(kind, {}), "vocab_size": vocabulary}
    sizes["vocab_size_per_layer_input"] = vocabulary
    chosen = {names.get(key, key): size for key, size in sizes.items()}
    chosen = {key: size for key, size in chosen.items() if key in known_sizes}
    chosen |= {key: value for key, value in MORE.get(kind, {}).items() if key not in names}
    chosen |= FIRST.get(kind, {})
    return AutoConfig.for_model(
        kind, **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, **chosen}
    )


def steady_norms(lm: Any) -> None:
    """Widens the epsilon of norms behind delta rules. States of random weights are nearly 0, and
    the models' own (1e-6) blows their rounding up: to 2e-4 nats of float64's logprobs, in prefill
    and in decoding alike.
    """
    for name, module in lm.named_modules():
        if name.endswith("linear_attn.norm"):
            module.variance_epsilon = 1e-3


def make_model(kind: str, tokenizer: Path, vocabulary: int, to: Path) -> Path:
    """A directory with a fresh model of a type, and the tokenizer of another directory. Of a type
    that is refused by its config alone there are no weights.
    """
    shutil.copytree(tokenizer, to)
    for name in ("model.safetensors", "config.json", "generation_config.json"):
        (to / name).unlink(missing_ok=True)
    config = config_of(kind, vocabulary)
    config.save_pretrained(to)
    try:
        require_supported(config, kind)
        require_text_model(config, kind)
        with torch.device("meta"):
            size = sum(p.numel() for p in AutoModelForCausalLM.from_config(config).parameters())
    except (UsageError, AttributeError):  # AttributeError: transformers cannot make it
        return to
    assert size < LARGEST, f"a {kind} model has {size} weights: a size of its own is not in SIZES"
    torch.manual_seed(0)
    lm: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for name, buffer in lm.named_buffers():
        computed = name.endswith(("_decay", "slope_rate"))  # of minimax's config, and stored too
        if name in lm.state_dict() and buffer.is_floating_point() and not computed:
            buffer.mul_(1.25).add_(0.01)  # stored numbers that a fresh model does not have
    lm.save_pretrained(to)
    return to
