"""Targets of an adapter that are no linear layers: experts and routers of a mixture."""

from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from helpers.model_types import config_of
from postgrad.core.errors import UsageError
from postgrad.models.adapters import add_adapter
from postgrad.models.settings import LoraSettings


def mixture(kind: str) -> Any:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config_of(kind, 37))


@pytest.mark.parametrize("kind", ["qwen3_moe", "mixtral"])
@pytest.mark.parametrize(
    ("target", "kind_of_weight"),
    [
        ("gate_up_proj", "the weight of all experts of a layer"),
        ("experts.down_proj", "the weight of all experts of a layer"),
        ("gate", "a router's weight"),
        ("mlp.gate", "a router's weight"),
    ],
)
def test_experts_and_routers_are_refused_by_name(
    target: str, kind_of_weight: str, kind: str
) -> None:
    lm = mixture(kind)
    with pytest.raises(
        UsageError,
        match=rf"model.lora.targets: '{target}' is {kind_of_weight} in this {kind} decoder, .*"
        r"name some of q_proj, k_proj, v_proj, o_proj, or leave \[model.lora\] out",
    ):
        add_adapter(lm, LoraSettings(rank=2, targets=("q_proj", target)), seed=0)
    assert all(parameter.requires_grad for parameter in lm.parameters())  # nothing was changed


def test_a_mixture_whose_targets_are_left_out_has_an_adapter_on_attention_alone() -> None:
    adapter = add_adapter(mixture("qwen3_moe"), LoraSettings(rank=2), seed=0)
    layers = {name.rpartition(".lora_")[0].rpartition(".")[2] for name in adapter.parameters()}
    assert layers == {"q_proj", "k_proj", "v_proj", "o_proj"}


def test_a_name_that_no_weight_of_a_mixture_has_is_no_linear_layer() -> None:
    with pytest.raises(UsageError, match="'up_proj' is no linear layer of this qwen3_moe decoder"):
        add_adapter(mixture("qwen3_moe"), LoraSettings(rank=2, targets=("up_proj",)), seed=0)
