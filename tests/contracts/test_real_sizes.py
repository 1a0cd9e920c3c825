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
