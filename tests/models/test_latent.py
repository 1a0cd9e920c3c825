"""Multi-head latent attention while sampling: it is attention over keys and values."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, DeepseekV3Config, Qwen3Config

from postgrad.models.attention import hidden_states
from postgrad.models.decoder import ModuleDecoder
from postgrad.models.latent import LatentDecoding, Latents, latents_of

HEADS, RANK, PLAIN, ROTATED, VALUES = 3, 8, 6, 4, 5


class LowRank(nn.Module):
    """A linear layer and a change of it, as an adapter is."""

    bias = None

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.change = nn.Parameter(torch.randn_like(base.weight))

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + x @ self.change.t()


def deepseek() -> Any:
    import postgrad.models.attention  # noqa: F401  registers our attention

    torch.manual_seed(0)
    config = DeepseekV3Config(
        vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=2,
        num_attention_heads=HEADS, num_key_value_heads=HEADS, q_lora_rank=None, kv_lora_rank=RANK,
        qk_nope_head_dim=PLAIN, qk_rope_head_dim=ROTATED, v_head_dim=VALUES,
        first_k_dense_replace=2, tie_word_embeddings=True,
    )  # fmt: skip
    lm: Any = AutoModelForCausalLM.from_config(config, attn_implementation="postgrad")
    return lm.double().eval()


class Causal:
    """Attention of one sequence by the textbook. shapes: of the keys and values that it got."""

    def __init__(self) -> None:
        self.shapes: list[tuple[int, ...]] = []

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, **how: Any) -> Tensor:
        self.shapes.append((*key.shape, value.shape[-1]))
        key, value = (t.expand(len(query), -1, -1) for t in (key, value))
        scores = query @ key.transpose(1, 2) * how["scale"]
        hidden = torch.ones(scores.shape[1:], dtype=torch.bool).triu(1)
        weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
        return (weights @ value).transpose(0, 1)


@torch.no_grad()
def run(lm: Any, latents: Latents | None) -> tuple[Tensor, Causal]:
    ids, causal = torch.arange(3, 14), Causal()
    context = causal if latents is None else LatentDecoding(causal, latents)
    with nullcontext() if latents is None else latents.watched():
        return hidden_states(lm, ids, torch.arange(len(ids)), context), causal


@pytest.mark.parametrize("adapted", [False, True])
def test_attention_over_latents_is_that_over_keys_and_values_in_float64(adapted: bool) -> None:
    lm = deepseek()
    if adapted:
        for layer in lm.model.layers:
            layer.self_attn.kv_b_proj = LowRank(layer.self_attn.kv_b_proj)
        lm.double()
    expected, plain = run(lm, None)
    hidden, cached = run(lm, latents_of(lm))
    assert plain.shapes == [(HEADS, 11, PLAIN + ROTATED, VALUES)] * 2
    assert cached.shapes == [(1, 11, RANK + ROTATED, RANK)] * 2
    torch.testing.assert_close(hidden, expected, rtol=1e-12, atol=1e-12)


def test_changed_weights_are_read_after_they_are_forgotten() -> None:
    lm = deepseek()
    for layer in lm.model.layers:
        layer.self_attn.kv_b_proj = LowRank(layer.self_attn.kv_b_proj)
    lm.double()
    decoder = ModuleDecoder(lm)
    assert decoder.latents is not None
    run(lm, decoder.latents)
    with torch.no_grad():
        lm.model.layers[0].self_attn.kv_b_proj.change.mul_(-2.0)
    decoder.forget()
    torch.testing.assert_close(
        run(lm, decoder.latents)[0], run(lm, None)[0], rtol=1e-12, atol=1e-12
    )


def test_a_forward_leaves_no_hook_and_no_latent_behind() -> None:
    lm = deepseek()
    latents = latents_of(lm)
    assert latents is not None
    with latents.watched():
        lm.model.layers[0].self_attn.kv_b_proj(torch.zeros(1, RANK, dtype=torch.float64))
    assert latents.take() is None
    assert not any(module._forward_pre_hooks for module in lm.modules())


def test_layers_with_keys_of_their_own_have_no_latents() -> None:
    config = Qwen3Config(
        vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=2, head_dim=8,
    )  # fmt: skip
    assert latents_of(AutoModelForCausalLM.from_config(config)) is None
