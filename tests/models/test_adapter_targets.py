"""Targets of an adapter: linear layers, and experts and routers of a mixture where named."""

from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from helpers.model_types import config_of
from postgrad.core.errors import UsageError
from postgrad.models.adapter_targets import target_layers, target_weights
from postgrad.models.adapters import add_adapter
from postgrad.models.settings import LoraSettings


def mixture(kind: str) -> Any:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config_of(kind, 37))


PARTS = {
    "experts": {"experts.gate_up_proj", "experts.down_proj"},
    "mlp.experts": {"experts.gate_up_proj", "experts.down_proj"},
    "experts.down_proj": {"experts.down_proj"},
    "mlp.experts.gate_up_proj": {"experts.gate_up_proj"},
    "router": {"gate.weight"},
    "gate": {"gate.weight"},
    "mlp.gate.weight": {"gate.weight"},
}


@pytest.mark.parametrize("kind", ["qwen3_moe", "mixtral"])
@pytest.mark.parametrize("target", PARTS)
def test_experts_and_routers_are_adapted_where_they_are_named(target: str, kind: str) -> None:
    lm, settings = mixture(kind), LoraSettings(rank=2, targets=("q_proj", target))
    prefixes = [f"model.layers.{layer}.mlp." for layer in range(2)]
    names = target_weights(lm, settings)
    assert set(names) == {prefix + part for prefix in prefixes for part in PARTS[target]}
    assert len(target_layers(lm, settings)) == 2  # q_proj of each layer
    merged = dict(add_adapter(lm, settings, seed=0).merged())
    assert set(names) < merged.keys()
    assert len(merged) == 2 + len(names)


@pytest.mark.parametrize("kind", ["qwen3_moe", "mixtral"])
@pytest.mark.parametrize("target", ["gate_up_proj", "down_proj"])
def test_weights_of_experts_are_not_meant_by_names_of_linear_layers(target: str, kind: str) -> None:
    lm = mixture(kind)
    with pytest.raises(
        UsageError,
        match=rf"model.lora.targets: '{target}' is the weight of all experts of a layer in this "
        rf'{kind} decoder: write "experts.{target}", or "experts"',
    ):
        add_adapter(lm, LoraSettings(rank=2, targets=("q_proj", target)), seed=0)
    assert all(parameter.requires_grad for parameter in lm.parameters())  # nothing was changed


@pytest.mark.parametrize("key", ["dropout", "dora"])
@pytest.mark.parametrize("target", ["experts", "router"])
def test_dropout_and_dora_on_a_mixture_are_refused_by_name(target: str, key: str) -> None:
    lm = mixture("qwen3_moe")
    asked = {"dropout": 0.1} if key == "dropout" else {"dora": True}
    settings = LoraSettings(rank=2, targets=("q_proj", target)).model_copy(update=asked)
    with pytest.raises(UsageError, match=rf"lora.{key}: adapters on experts and routers \(mlp"):
        add_adapter(lm, settings, seed=0)
    assert all(parameter.requires_grad for parameter in lm.parameters())


def test_a_mixture_whose_targets_are_left_out_has_an_adapter_on_attention_alone() -> None:
    adapter = add_adapter(mixture("qwen3_moe"), LoraSettings(rank=2), seed=0)
    layers = {name.rpartition(".lora_")[0].rpartition(".")[2] for name in adapter.parameters()}
    assert layers == {"q_proj", "k_proj", "v_proj", "o_proj"}


def test_a_name_that_no_weight_of_a_mixture_has_is_no_linear_layer() -> None:
    with pytest.raises(UsageError, match="'up_proj' is no linear layer of this qwen3_moe decoder"):
        add_adapter(mixture("qwen3_moe"), LoraSettings(rank=2, targets=("up_proj",)), seed=0)
