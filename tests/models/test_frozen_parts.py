"""Parts of a model that are not trained, by their weights."""

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from helpers.model_types import MIXTURES, config_of
from postgrad.core.errors import UsageError
from postgrad.models.frozen_parts import freeze_parts, frozen_names
from postgrad.models.routers import balance_of
from postgrad.models.settings import LoraSettings, ModelSettings

ROUTERS = ModelSettings(freeze=("router",))
# What the weights of a router are called in its layer: modeling files of transformers.
NAMES = {
    "qwen3_moe": {"mlp.gate.weight"},
    "qwen2_moe": {"mlp.gate.weight"},  # and not the gate of the shared expert
    "mixtral": {"mlp.gate.weight"},
    "deepseek_v3": {"mlp.gate.weight"},  # its bias is a buffer
    "gpt_oss": {"mlp.router.weight", "mlp.router.bias"},
    "granitemoe": {"block_sparse_moe.router.weight"},
    "afmoe": {"mlp.router.gate.weight", "mlp.expert_bias"},
    "ernie4_5_moe": {"mlp.gate.weight", "mlp.gate.moe_statics.e_score_correction_bias"},
    "laguna": {"mlp.gate.weight", "mlp.gate.e_score_correction_bias"},
    "hunyuan_v1_moe": {"mlp.gate.wg.weight"},
    "dbrx": {"ffn.router.layer.weight"},
    "jetmoe": {"mlp.router.layer.weight", "self_attention.experts.router.layer.weight"},
    "nemotron_h": {"mixer.gate.weight"},
    "jamba": {"feed_forward.router.weight"},
}


def on_meta(kind: str, auto: Any = AutoModelForCausalLM, **changes: Any) -> Any:
    config = config_of(kind, 64)
    for key, value in changes.items():
        setattr(config, key, value)
    with torch.device("meta"):
        return auto.from_config(config)


def layers(names: Iterable[str]) -> set[str]:
    """The numbers of the layers in names of weights."""
    return {next(part for part in name.split(".") if part.isdigit()) for name in names}


@pytest.mark.parametrize("kind", NAMES)
def test_routers_are_their_weights_and_the_biases_that_they_choose_by(kind: str) -> None:
    lm = on_meta(kind)
    names = frozen_names(lm, ("router",))
    assert {name.split(".", 3)[3] for name in names} == NAMES[kind]
    assert names <= {name for name, _ in lm.named_parameters()}


@pytest.mark.parametrize("kind", MIXTURES)
def test_every_layer_with_experts_has_a_router(kind: str) -> None:
    lm = on_meta(kind)
    experts = [name for name, _ in lm.named_parameters() if ".experts." in name]
    names = frozen_names(lm, ("router",))
    assert layers(names) == layers(experts)
    assert not names & set(experts)


def test_gemma4s_routers_have_scales_too() -> None:
    lm = on_meta("gemma4_text", enable_moe_block=True, top_k_experts=2)
    ends = {name.split(".", 3)[3] for name in frozen_names(lm, ("router",))}
    assert ends == {"router.scale", "router.per_expert_scale", "router.proj.weight"}


def test_a_model_that_scores_has_the_routers_of_its_decoder() -> None:
    scores = on_meta("qwen3_moe", AutoModelForSequenceClassification)
    assert frozen_names(scores, ("router",)) == frozen_names(on_meta("qwen3_moe"), ("router",))


def test_frozen_routers_have_no_gradient_and_all_else_has() -> None:
    torch.manual_seed(0)
    lm: Any = AutoModelForCausalLM.from_config(config_of("qwen3_moe", 64))
    freeze_parts(lm, ROUTERS)
    lm(torch.arange(1, 30)[None]).logits.square().sum().backward()
    without = {name for name, weight in lm.named_parameters() if weight.grad is None}
    assert without == {f"model.layers.{n}.mlp.gate.weight" for n in range(2)}


@pytest.mark.parametrize(
    ("part", "message"),
    [
        ("router", "this llama model is no mixture of experts, and has no routers: leave it out"),
        ("vision", "this llama model reads text alone, and has no tower: leave it out"),
        ("projector", "this llama model reads text alone, and has no projector: leave it out"),
    ],
)
def test_a_part_that_a_model_does_not_have_is_refused_by_its_name(part: Any, message: str) -> None:
    with pytest.raises(UsageError) as error:
        freeze_parts(on_meta("llama"), ModelSettings(freeze=(part,)), "critic.model.freeze")
    assert str(error.value) == f'critic.model.freeze: "{part}": {message}'


def test_a_mixture_has_no_tower_to_freeze_beside_its_routers() -> None:
    with pytest.raises(UsageError, match='"vision": this qwen3_moe model reads text alone'):
        freeze_parts(on_meta("qwen3_moe"), ModelSettings(freeze=("router", "vision")))


@pytest.mark.parametrize(
    ("kind", "targets", "weight"),
    [
        ("qwen3_moe", ("q_proj", "gate"), "model.layers.0.mlp.gate.weight"),
        ("hunyuan_v1_moe", ("wg",), "model.layers.0.mlp.gate.wg.weight"),
        ("hunyuan_v1_moe", (), "model.layers.0.mlp.gate.wg.weight"),  # every linear layer
    ],
)
def test_an_adapter_on_frozen_routers_is_refused(
    kind: str, targets: tuple[str, ...], weight: str
) -> None:
    settings = ModelSettings(freeze=("router",), lora=LoraSettings(targets=targets))
    with pytest.raises(UsageError, match=f"the adapter would change {weight}: name layers beside"):
        freeze_parts(on_meta(kind), settings)


def test_an_adapter_beside_frozen_routers_is_not_refused() -> None:
    lora = LoraSettings(targets=("q_proj", "experts"))
    freeze_parts(on_meta("qwen3_moe"), ModelSettings(freeze=("router",), lora=lora))


def test_frozen_routers_have_no_balance_loss_unless_one_is_stated() -> None:
    config = config_of("qwen3_moe", 64)
    config.router_aux_loss_coef = 0.25
    assert balance_of(config, ModelSettings()) == 0.25
    assert balance_of(config, ROUTERS) == 0.0
    stated = ModelSettings(freeze=("router",), router_aux_loss_coef=0.5)
    assert balance_of(config, stated) == 0.5
