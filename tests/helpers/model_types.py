"""Tiny models of every causal type that transformers has, with a tokenizer beside them."""

import shutil
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

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
}  # fmt: skip
# Keys that a type cannot do without, or cannot have, beside them.
MORE: dict[str, dict[str, Any]] = {
    "deepseek_v2": {"num_key_value_heads": 4},
    "deepseek_v3": {"num_key_value_heads": 4},
    "glm4_moe_lite": {"num_key_value_heads": 4},
    "minicpm3": {"num_key_value_heads": 4},
    "youtu": {"num_key_value_heads": 4},
    "axk1": {"num_key_value_heads": 4},
    "zaya": {"num_experts_per_tok": 1},
}


def config_of(kind: str, vocabulary: int) -> Any:
    """A config of a type with small sizes, those that it has a key for."""
    plain = AutoConfig.for_model(kind)
    known = plain.to_dict()
    names = getattr(plain, "attribute_map", {})
    sizes = {**SIZES, **MORE.get(kind, {}), "vocab_size": vocabulary}
    sizes["vocab_size_per_layer_input"] = vocabulary
    chosen = {names.get(key, key): size for key, size in sizes.items()}
    chosen = {key: size for key, size in chosen.items() if key in known}
    chosen |= {key: value for key, value in MORE.get(kind, {}).items() if key not in names}
    return AutoConfig.for_model(
        kind, **{**chosen, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    )


def make_model(kind: str, tokenizer: Path, vocabulary: int, to: Path) -> Path:
    """A directory with a fresh model of a type, and the tokenizer of another directory."""
    shutil.copytree(tokenizer, to)
    for name in ("model.safetensors", "config.json", "generation_config.json"):
        (to / name).unlink(missing_ok=True)
    torch.manual_seed(0)
    lm: Any = AutoModelForCausalLM.from_config(config_of(kind, vocabulary), dtype=torch.float32)
    lm.save_pretrained(to)
    return to
