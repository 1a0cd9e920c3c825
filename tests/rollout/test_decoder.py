"""The decoder that runs layers itself, against the model's own modules."""

import numpy as np
import pytest
import torch
from torch import nn

from helpers.weights import take_over
from postgrad.layout.blocks import plan_blocks
from postgrad.models.decoder import (
    ALIGNED,
    LayeredDecoder,
    ModuleDecoder,
    decoder_of,
    move_together,
)
from postgrad.models.linear import in_order, project
from postgrad.models.tree import TreeAttention
from postgrad.rollout.engine import Request, generate
from postgrad.rollout.local import engine as engine_module
from postgrad.rollout.local.cache import Decoding
from postgrad.rollout.local.engine import LocalEngine
from postgrad.rollout.local.prompts import lay_out_plain
from postgrad.rollout.settings import SamplingSettings

LAYERED = ["qwen2", "qwen3", "llama", "mistral"]
CPU = torch.device("cpu")


def with_biases(lm):
    """Every bias and norm that the type has, away from where it starts."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in lm.named_parameters():
            if name.endswith("bias") or "norm" in name:
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.2)
    return lm


def logits(decoder, sequences):
    layout, _ = lay_out_plain(sequences)
    context = TreeAttention(plan_blocks(layout), CPU)
    ids, positions = (torch.from_numpy(a) for a in (layout.token_ids, layout.positions))
    with torch.inference_mode():
        return decoder.logits(decoder.hidden_states(ids, positions, context))


@pytest.mark.parametrize("kind", [*LAYERED, "gemma", "gemma2", "gemma3_text"])
def test_known_types_run_layer_by_layer_and_others_through_their_modules(kind, model):
    assert isinstance(decoder_of(model(kind)), LayeredDecoder) == (kind in LAYERED)


@pytest.mark.parametrize("kind", LAYERED)
def test_layers_give_the_logits_of_the_modules(kind, model, prompt):
    lm = with_biases(model(kind))
    sequences = [prompt(seed, length) for seed, length in enumerate([7, 1, 20])]
    expected = logits(ModuleDecoder(lm), sequences)
    torch.testing.assert_close(logits(LayeredDecoder(lm), sequences), expected, atol=2e-5, rtol=0)
    # the weights are views now: the modules still say the same
    torch.testing.assert_close(logits(ModuleDecoder(lm), sequences), expected, atol=2e-6, rtol=0)


@pytest.mark.parametrize("kind", [*LAYERED, "gemma2"])
def test_moved_together_all_weights_are_one_piece_of_memory_and_none_is_joined_again(
    kind, model, prompt
):
    lm = with_biases(model(kind))
    before = {name: tensor.clone() for name, tensor in lm.state_dict().items()}
    expected = logits(ModuleDecoder(lm), [prompt(0, 7)])
    move_together(lm, CPU)
    places = {name: parameter.data_ptr() for name, parameter in lm.named_parameters()}
    assert len({p.untyped_storage().data_ptr() for p in lm.parameters()}) == 1
    assert {place % ALIGNED for place in places.values()} == {0}
    actual = logits(decoder_of(lm), [prompt(0, 7)])
    assert {name: parameter.data_ptr() for name, parameter in lm.named_parameters()} == places
    assert all(torch.equal(tensor, before[name]) for name, tensor in lm.state_dict().items())
    torch.testing.assert_close(actual, expected, atol=2e-5, rtol=0)


@pytest.mark.parametrize("kind", LAYERED)
def test_layers_in_bfloat16_round_no_worse_than_the_modules(kind, model, prompt):
    sequences = [prompt(seed, length) for seed, length in enumerate([7, 1, 20])]
    exact = logits(ModuleDecoder(with_biases(model(kind))), sequences)
    lm = with_biases(model(kind)).to(torch.bfloat16)
    modules = (logits(ModuleDecoder(lm), sequences) - exact).abs().mean()
    layers = (logits(LayeredDecoder(lm), sequences) - exact).abs().mean()
    assert layers < 1.2 * modules


def test_biases_of_every_projection_count(model, prompt):
    lm = model("llama")
    for layer in lm.model.layers:
        for module in (layer.self_attn.o_proj, layer.mlp.gate_proj, layer.mlp.up_proj):
            module.bias = nn.Parameter(torch.randn(module.out_features) * 0.2)
    actual = logits(decoder_of(lm), [prompt(0, 9)])
    torch.testing.assert_close(actual, logits(ModuleDecoder(lm), [prompt(0, 9)]), atol=2e-5, rtol=0)


def test_weights_that_are_copied_in_are_used_by_every_decoder_of_the_model(model, prompt):
    lm = model("qwen3")
    first, second = decoder_of(lm), decoder_of(lm)
    other = model("qwen3", seed=1)
    take_over(lm, other.named_parameters())
    expected = logits(ModuleDecoder(other), [prompt(0, 9)])
    for decoder in (first, second):
        decoder.forget()
        torch.testing.assert_close(logits(decoder, [prompt(0, 9)]), expected, atol=2e-5, rtol=0.0)


def test_a_model_with_a_wrapped_projection_runs_through_its_modules(model):
    lm = model("llama")
    lm.model.layers[1].mlp.up_proj = nn.Sequential(lm.model.layers[1].mlp.up_proj)
    assert isinstance(decoder_of(lm), ModuleDecoder)


@pytest.mark.parametrize("kind", LAYERED)
def test_the_engine_samples_the_same_tokens_through_both(
    kind, model, prompt, tokenizer, monkeypatch
):
    def sampled():
        engine = LocalEngine(with_biases(model(kind)), tokenizer, slots=5, cache_tokens=5 * 64)
        settings = SamplingSettings(max_new_tokens=24)
        asked = [Request(i, (0, 1, 2), prompt(i, 3 + 5 * i), settings) for i in range(4)]
        return generate(engine, asked)

    fast = sampled()
    monkeypatch.setattr(engine_module, "decoder_of", ModuleDecoder)
    for completion, other in zip(fast, sampled(), strict=True):
        assert completion.token_ids.tolist() == other.token_ids.tolist()
        np.testing.assert_allclose(completion.logprobs, other.logprobs, atol=2e-5)


@pytest.mark.slow
def test_rows_that_end_at_any_length_are_decoded_in_few_shapes(
    model, prompt, tokenizer, monkeypatch
):
    asked = [
        Request(i, (0,), prompt(i, 3 + i % 5), SamplingSettings(max_new_tokens=1 + i))
        for i in range(40)
    ]

    def sampled(slots):
        return generate(
            LocalEngine(model("qwen3"), tokenizer, slots=slots, cache_tokens=slots * 64), asked
        )

    shapes = set()
    attend = Decoding.attend

    def seen(self, layer, query, key, value, **how):
        shapes.add((query.shape[1], self._prompt_places, self._response_places))
        return attend(self, layer, query, key, value, **how)

    alone = sampled(1)
    monkeypatch.setattr(Decoding, "attend", seen)
    together = sampled(40)
    assert {rows for rows, _, _ in shapes} == {1, 2, 4, 8, 16, 32, 40}
    assert {old for _, old, _ in shapes} == {16}
    assert {new for _, _, new in shapes} == {16, 32, 48}
    for completion, other in zip(alone, together, strict=True):
        assert completion.token_ids.tolist() == other.token_ids.tolist()
        np.testing.assert_allclose(completion.logprobs, other.logprobs, atol=2e-5)


@pytest.mark.parametrize("with_bias", [False, True])
def test_a_product_is_that_of_float64(with_bias):
    torch.manual_seed(0)
    x, weight, bias = torch.randn(5, 33), torch.randn(70, 33), torch.randn(70)
    with torch.inference_mode():
        product = project(x, in_order(weight), bias if with_bias else None)
    expected = x.double() @ weight.double().T + (bias.double() if with_bias else 0.0)
    torch.testing.assert_close(product.double(), expected, atol=1e-5, rtol=0.0)
