"""Norms and biases are told from matrices also where they have two dimensions."""

from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from postgrad.learner.optimizer import MasterOptimizer
from postgrad.learner.settings import LearnerSettings
from postgrad.models.matrices import is_hidden_matrix, is_matrix

SIZES = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "eos_token_id": 1,
    "pad_token_id": 0, "bos_token_id": None,
}  # fmt: skip
WITH_PLAIN_ROWS = {
    "gpt_oss": ({"num_local_experts": 130, "num_experts_per_tok": 2}, "down_proj_bias"),
    "cohere": ({"use_qk_norm": True}, "q_norm.weight"),
}


def fresh(kind: str) -> Any:
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **{**SIZES, **WITH_PLAIN_ROWS[kind][0]})
    return AutoModelForCausalLM.from_config(config)


@pytest.mark.parametrize("settings", [{}, {"optimizer": "muon"}, {"optimizer_state": "8bit"}])
@pytest.mark.parametrize("kind", WITH_PLAIN_ROWS)
def test_a_bias_of_each_expert_and_a_norm_of_each_head_do_not_decay(
    kind: str, settings: dict[str, Any]
) -> None:
    lm, end = fresh(kind), WITH_PLAIN_ROWS[kind][1]
    (name,) = (name for name, _ in lm.named_parameters() if name.endswith(end))
    weight = lm.get_parameter(name)
    with torch.no_grad():
        weight.fill_(1.0)
    assert weight.ndim == 2
    optimizer = MasterOptimizer(lm, LearnerSettings(weight_decay=0.5, **settings))
    optimizer.step(0.1)
    torch.testing.assert_close(weight, torch.ones_like(weight), rtol=0, atol=0)
    assert f"{name}.exp_avg" in optimizer.state()
    assert f"{name}.exp_avg_scale" not in optimizer.state()


def test_matrices_of_layers_experts_and_adapters_decay() -> None:
    inside = "model.layers.0."
    for name in ("self_attn.q_proj.weight", "self_attn.q_proj.lora_A.weight"):
        assert is_matrix(inside + name, 2)
        assert is_hidden_matrix(inside + name, 2)
    assert is_hidden_matrix("transformer.h.0.attn.c_attn.weight", 2)
    assert is_hidden_matrix("transformer.blocks.11.ffn.router.layer.weight", 2)
    assert not is_hidden_matrix("model.visual.blocks.0.attn.qkv.weight", 2)  # of a tower
    experts = inside + "mlp.experts"
    assert is_matrix(f"{experts}.gate_up_proj", 3)
    assert not is_hidden_matrix(f"{experts}.gate_up_proj", 3)
    assert is_matrix(f"{experts}.base_layer.lora_A.weight", 2)
    assert not is_hidden_matrix(f"{experts}.base_layer.lora_A.weight", 2)
    assert is_matrix("model.embed_tokens.weight", 2)
    assert not is_hidden_matrix("model.embed_tokens.weight", 2)
    assert not is_matrix(inside + "input_layernorm.weight", 1)
