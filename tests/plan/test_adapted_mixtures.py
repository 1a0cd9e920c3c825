"""What a plan counts of adapters on experts and routers, and on layers that differ, against those
of the real models.
"""

from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from helpers.model_types import config_of
from postgrad.core.errors import UsageError
from postgrad.learner.optimizer import MasterOptimizer
from postgrad.learner.settings import LearnerSettings
from postgrad.models.adapters import add_adapter
from postgrad.models.known_shapes import any_shape
from postgrad.models.settings import LoraSettings, ModelInit, ModelSettings
from postgrad.models.shapes import shape_of_init
from postgrad.models.states import carry_states
from postgrad.plan.activations import Blocks, kept, kept_by_layer
from postgrad.plan.adapters import (
    adapter_flops,
    adapter_parameters,
    merged_sizes,
    require_targets,
)
from postgrad.plan.held import moment_bytes
from postgrad.plan.roles import PlannedRole

TARGETS = [("experts", "router"), ("q_proj", "experts.down_proj"), ("mlp.experts.gate_up_proj",)]


def shape_of(kind: str) -> Any:
    return any_shape(config_of(kind, 37).to_dict(), kind)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("targets", TARGETS)
@pytest.mark.parametrize("kind", ["qwen3_moe", "gpt_oss"])
def test_parameters_and_moments_are_those_of_the_adapter(
    kind: str, targets: tuple[str, ...], optimizer: str
) -> None:
    if optimizer == "muon" and "q_proj" not in targets and "router" not in targets:
        pytest.skip("Muon has no matrix there")
    lora, learner = LoraSettings(rank=3, targets=targets), LearnerSettings(optimizer=optimizer)  # pyright: ignore[reportArgumentType]
    role = PlannedRole("policy", shape_of(kind), ModelSettings(path="x", lora=lora), learner)
    adapter = add_adapter(AutoModelForCausalLM.from_config(config_of(kind, 37)), lora, seed=0)
    parameters = adapter.parameters()
    assert role.trained == sum(p.numel() for p in parameters.values())
    steps = MasterOptimizer(parameters, learner)
    for parameter in parameters.values():
        parameter.grad = torch.ones_like(parameter)
    steps.step(0.1)
    moments = [t for n, t in steps.state().items() if t.ndim == 2]
    assert moment_bytes(role) == sum(tensor.nbytes for tensor in moments)
    assert sum(merged_sizes(role.shape, lora)) * 2 == sum(t.numel() for _, t in adapter.merged())


# Layers that attend beside layers that carry a state, dense layers beside mixtures, and matrices
# outside of layers.
DIFFERING = (
    *("qwen3_next", "lfm2", "deepseek_v3", "gemma3n_text", "gemma4_text"),
    *("falcon_h1", "mamba2", "bamba"),  # mixers read the weights of some of their layers themselves
    # Whose scans go from token to token, in Python.
    *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("jamba", "zamba")),
)


@pytest.mark.parametrize("kind", DIFFERING)
def test_layers_that_differ_are_counted_by_their_kind(kind: str) -> None:
    linears, shape = LoraSettings(rank=3), shape_of(kind)
    for lora in (linears, linears.model_copy(update={"layers_to_transform": (0,)})):
        lm = AutoModelForCausalLM.from_config(config_of(kind, 37))
        carry_states(lm)  # as `load_model` does
        parameters = add_adapter(lm, lora, seed=0).parameters()
        assert adapter_parameters(shape, lora) == sum(p.numel() for p in parameters.values())


BY_LAYER = LoraSettings(
    rank=3, targets=("q_proj", "o_proj", "experts", "router"), layers_to_transform=(1,),
    rank_pattern={"o_proj": 5, "experts": 2, "layers.1.mlp.experts.down_proj": 7, "router": 1},
)  # fmt: skip


def test_ranks_and_places_of_single_layers_are_counted() -> None:
    role = PlannedRole(
        "policy", shape_of("qwen3_moe"), ModelSettings(path="x", lora=BY_LAYER), LearnerSettings()
    )
    adapter = add_adapter(
        AutoModelForCausalLM.from_config(config_of("qwen3_moe", 37)), BY_LAYER, seed=0
    )
    parameters = adapter.parameters()
    assert role.trained == sum(p.numel() for p in parameters.values())
    assert moment_bytes(role) == 8 * role.trained
    assert sum(merged_sizes(role.shape, BY_LAYER, 1)) == sum(t.numel() for _, t in adapter.merged())
    assert merged_sizes(role.shape, BY_LAYER, 0) == []
    experts = sum(p.numel() for name, p in parameters.items() if "experts" in name)
    chosen, of = role.shape.counted.chosen, role.shape.counted.experts
    per_token = role.trained - experts + experts * chosen // of
    assert adapter_flops(role.shape, BY_LAYER) == 2 * per_token
    nothing = LoraSettings(rank=3, targets=("q_proj",), layers_to_transform=(0,))
    patterned = nothing.model_copy(update={"rank_pattern": {"q_proj": 10}})
    blocks = Blocks(1.0, 1.0)
    keeps = [
        kept(role.shape, 4, lora, blocks, checkpointing=False, cpu=False)
        for lora in (nothing, patterned)
    ]
    assert keeps[1] - keeps[0] == 4 * 7  # of one layer


def test_activations_count_each_row_of_an_expert() -> None:
    shape, blocks = shape_of("qwen3_moe"), Blocks(1.0, 1.0)
    plain = LoraSettings(rank=3, targets=("q_proj",))
    more = LoraSettings(rank=3, targets=("q_proj", "experts", "router"))
    for width in (4, 2):
        kept = [kept_by_layer(shape, width, lora, blocks, cpu=False) for lora in (plain, more)]
        inputs = 2 * (32 + 16) + 32  # two experts' hidden and inner rows, and the router's
        assert kept[1] - kept[0] == width * (inputs + 3 * (2 + 2 + 1))


def test_operations_are_those_of_products_with_a_and_b_of_each_chosen_expert() -> None:
    shape = shape_of("qwen3_moe")  # two layers; of four experts of 32 x 16 two a token
    plain = LoraSettings(rank=3, targets=("q_proj",))
    more = LoraSettings(rank=3, targets=("q_proj", "experts", "router"))
    both = 2 * ((32 + 2 * 16) + (16 + 32))  # gate and up are one weight
    added = adapter_flops(shape, more) - adapter_flops(shape, plain)
    assert added == 2 * 2 * 3 * (both + 32 + 4)
    assert adapter_flops(shape, None) == 0


@pytest.mark.parametrize("target", ["experts", "router", "nothing", "experts.q_proj"])
def test_targets_that_a_dense_model_has_none_of_are_refused(target: str) -> None:
    with pytest.raises(UsageError, match=rf"targets: '{target}' is no linear layer, .*has q_proj"):
        require_targets(shape_of_init(ModelInit()), LoraSettings(targets=("q_proj", target)))


def test_an_adapter_of_a_model_without_linear_layers_is_refused() -> None:
    with pytest.raises(UsageError, match="this gpt2 decoder has no linear layers"):
        require_targets(shape_of("gpt2"), LoraSettings())


def test_targets_that_a_mixture_has_none_of_are_refused_as_by_the_adapter() -> None:
    shape = shape_of("qwen3_moe")
    for targets in (*TARGETS, ("layers.0.self_attn.q_proj",), ("gate",), ("self_attn.o_proj",)):
        require_targets(shape, LoraSettings(targets=targets))
    for target in ("down_proj", "up_proj", "weight", "experts.gate"):
        with pytest.raises(UsageError, match=r"has q_proj, .*experts.down_proj, .*router"):
            require_targets(shape, LoraSettings(targets=(target,)))
