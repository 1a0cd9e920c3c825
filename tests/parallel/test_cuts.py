"""Which way the matrices of a decoder are cut, by name."""

import pytest

from postgrad.parallel.sharding import cut_dim

LAYER = "model.layers.3"


@pytest.mark.parametrize(
    ("name", "dim"),
    [
        (f"{LAYER}.self_attn.q_proj.weight", 0),
        (f"{LAYER}.self_attn.k_proj.bias", 0),
        (f"{LAYER}.mlp.up_proj.weight", 0),
        (f"{LAYER}.self_attn.o_proj.weight", 1),
        (f"{LAYER}.mlp.down_proj.weight", 1),
        ("layers.0.mlp.down_proj.weight", 1),
        (f"{LAYER}.mlp.gate_proj.base_layer.weight", 0),
        (f"{LAYER}.mlp.down_proj.base_layer.weight", 1),
        (f"{LAYER}.self_attn.q_proj.lora_A.policy.weight", None),
        (f"{LAYER}.self_attn.q_proj.lora_B.policy.weight", 0),
        (f"{LAYER}.self_attn.o_proj.lora_A.policy.weight", 1),
        (f"{LAYER}.self_attn.o_proj.lora_B.policy.weight", None),
        (f"base_model.model.{LAYER}.mlp.down_proj.lora_A.weight", 1),
        (f"base_model.model.{LAYER}.mlp.gate_proj.lora_B.weight", 0),
        (f"{LAYER}.self_attn.q_norm.weight", None),
        (f"{LAYER}.input_layernorm.weight", None),
        ("model.embed_tokens.weight", None),
        ("lm_head.weight", None),
        ("score.weight", None),
        ("model.vision.q_proj.weight", None),
    ],
)
def test_what_makes_features_is_cut_by_outputs_and_what_adds_them_up_by_inputs(
    name: str, dim: int | None
) -> None:
    assert cut_dim(name) == dim


def test_the_moments_of_a_weight_are_not_taken_for_it() -> None:
    assert cut_dim(f"{LAYER}.self_attn.q_proj.weight.exp_avg") is None
