"""Families whose published sizes fit no test machine: on the meta device, which has shapes and no
numbers, the whole model goes through a packed forward and backward, and the plan counts it.
"""

from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from postgrad.layout.blocks import plan_blocks
from postgrad.models.attention import CARRIER
from postgrad.models.decoder import ModuleDecoder
from postgrad.models.known_shapes import any_shape
from postgrad.models.states import StateCarrier, state_mixers
from postgrad.models.tree import TreeAttention
from postgrad.rollout.local.cache import bytes_per_token
from postgrad.rollout.local.prompts import lay_out_plain, run_plain

META = torch.device("meta")
# Billions of weights in the config that transformers documents the type with.
SIZES = {
    "deepseek_v3": 671.0, "gpt_oss": 116.8, "qwen3_next": 79.7, "mixtral": 46.7, "glm4_moe": 103.5,
    "kimi_linear": 49.1, "qwen3_moe": 15.4, "bamba": 10.0, "mamba2": 7.3, "phi3": 3.8,
}  # fmt: skip
SLOW = ("deepseek_v3", "gpt_oss", "qwen3_next")  # a kind of cache each; "make test-long" has all


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(kind, marks=(pytest.mark.slow, *([] if kind in SLOW else [pytest.mark.long])))
        for kind in SIZES
    ],
)
def test_a_model_of_its_real_size_is_run_forward_and_backward_and_planned(kind: str) -> None:
    config = AutoConfig.for_model(kind)
    with META:
        lm: Any = AutoModelForCausalLM.from_config(
            config, attn_implementation="postgrad", dtype=torch.bfloat16
        )
    if state_mixers(lm):
        setattr(lm, CARRIER, StateCarrier(lm))
    layout, tokens = lay_out_plain(
        [np.arange(3, 40, dtype=np.int32), np.arange(3, 20, dtype=np.int32)]
    )
    attention = TreeAttention(plan_blocks(layout), META)
    hidden, recording = run_plain(ModuleDecoder(lm), layout, META, attention)
    assert hidden.shape == (len(tokens.values), config.hidden_size)
    hidden.float().sum().backward()
    without = {name for name, weight in lm.named_parameters() if weight.grad is None}
    assert without == {"lm_head.weight"}
    shape = any_shape(config.to_dict(), kind)
    assert shape.parameters() == sum(weight.numel() for weight in lm.parameters())
    assert shape.parameters() / 1e9 == pytest.approx(SIZES[kind], abs=0.06)
    assert shape.cache_bytes_per_token(2) == bytes_per_token(recording.shapes, torch.bfloat16)


# What the configs of two checkpoints on the hub say beside the defaults of their types: with keys
# that transformers does not read, and the type of the whole model for its tower.
HUB_TEXT: dict[str, Any] = {
    "attn_output_gate": True, "full_attention_interval": 4, "head_dim": 256,
    "linear_num_key_heads": 16, "mamba_ssm_dtype": "float32", "mtp_num_hidden_layers": 1,
    "mtp_use_dedicated_embeddings": False, "vocab_size": 248320,
    "max_position_embeddings": 262144,
    "rope_parameters": {
        "mrope_interleaved": True, "mrope_section": [11, 11, 10], "rope_type": "default",
        "rope_theta": 10_000_000, "partial_rotary_factor": 0.25,
    },
}  # fmt: skip
HUB = {
    "qwen3_5": {  # Qwen3.5-27B
        "hidden_size": 5120, "intermediate_size": 17408, "num_hidden_layers": 64,
        "num_attention_heads": 24, "num_key_value_heads": 4, "linear_num_value_heads": 48,
    },
    "qwen3_5_moe": {  # Qwen3.5-35B-A3B
        "hidden_size": 2048, "num_hidden_layers": 40, "num_attention_heads": 16,
        "num_key_value_heads": 2, "linear_num_value_heads": 32, "num_experts": 256,
        "num_experts_per_tok": 8, "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512, "router_aux_loss_coef": 0.001,
    },
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "billions"), [("qwen3_5", 27.4), ("qwen3_5_moe", 35.1)])
def test_qwen3_5_is_planned_from_a_config_of_the_hub(kind: str, billions: float) -> None:
    text = {**HUB_TEXT, **HUB[kind], "model_type": f"{kind}_text"}
    tower = {
        "model_type": kind, "depth": 27, "hidden_size": 1152, "intermediate_size": 4304,
        "num_heads": 16, "patch_size": 16, "out_hidden_size": text["hidden_size"],
        "deepstack_visual_indexes": [],
    }  # fmt: skip
    shape = any_shape({"model_type": kind, "text_config": text, "vision_config": tower}, kind)
    assert shape.parameters() / 1e9 == pytest.approx(billions, abs=0.06)
    assert shape.attending == shape.layers // 4
    assert shape.tower is not None
    assert shape.tower.parameters / 1e9 == pytest.approx(0.42, abs=0.01)
    assert shape.counted is not None
    # of each of the other layers a matrix for each head, and the newest inputs of a convolution
    heads = text["linear_num_value_heads"]
    states = heads * 128 * 128 + 4 * (2 * 16 + heads) * 128
    assert shape.counted.states == (shape.layers - shape.attending) * states
    assert shape.counted.balance == (0.001 if "moe" in kind else 0.0)
