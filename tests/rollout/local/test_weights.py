"""Taking over weights."""

import numpy as np
import pytest
import torch

from helpers.weights import take_over
from postgrad.core.errors import RunError
from postgrad.layout.blocks import plan_blocks
from postgrad.models.decoder import ModuleDecoder, decoder_of
from postgrad.models.tree import TreeAttention
from postgrad.rollout.local.prompts import lay_out_plain


def logits_of(decoder, ids):
    layout, _ = lay_out_plain([ids.numpy().astype(np.int32)])
    context = TreeAttention(plan_blocks(layout), torch.device("cpu"))
    with torch.inference_mode():
        hidden = decoder.hidden_states(ids, torch.from_numpy(layout.positions), context)
        return decoder.logits(hidden)


def test_every_weight_is_copied_and_converted(model):
    engine_model, other = model("qwen3").to(torch.bfloat16), model("qwen3", seed=1)
    take_over(engine_model, other.named_parameters())
    for name, parameter in engine_model.named_parameters():
        torch.testing.assert_close(parameter, other.get_parameter(name).bfloat16())


@pytest.mark.parametrize("dropped", ["lm_head.weight", "model.embed_tokens.weight"])
def test_a_tied_weight_may_come_under_either_name(model, dropped):
    engine_model, other = model("gemma"), model("gemma", seed=1)
    weights = dict(other.named_parameters(remove_duplicate=False))
    assert len(weights) == len(list(other.parameters())) + 1
    del weights[dropped]
    take_over(engine_model, weights.items())
    torch.testing.assert_close(engine_model.lm_head.weight, other.lm_head.weight)
    torch.testing.assert_close(engine_model.model.embed_tokens.weight, other.lm_head.weight)


def test_missing_unknown_and_misshapen_weights_are_named(model):
    engine_model = model("qwen3")
    weights = dict(engine_model.named_parameters())
    norm = weights.pop("model.norm.weight")
    with pytest.raises(RunError, match=r"1 are missing, such as model.norm.weight"):
        take_over(engine_model, weights.items())
    with pytest.raises(RunError, match=r"has no 'model.norm.wait'"):
        take_over(engine_model, [("model.norm.wait", norm)])
    with pytest.raises(RunError, match=r"model.norm.weight is \[3\], the model's is \[32\]"):
        take_over(engine_model, [("model.norm.weight", torch.zeros(3))])


def test_what_is_borrowed_lies_where_the_lender_has_it_and_follows_it(model):
    engine_model, lender = model("qwen3"), model("qwen3", seed=1)
    decoder = decoder_of(
        engine_model
    )  # lays queries, keys and values side by side, gate and up too
    take_over(engine_model, lender.named_parameters(), borrow=True)
    joined = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
    for name, parameter in engine_model.named_parameters():
        lent = lender.get_parameter(name)
        assert torch.equal(parameter, lent)
        assert (parameter.data_ptr() == lent.data_ptr()) == (name.split(".")[-2] not in joined)
    ids = torch.arange(9, dtype=torch.int64) % 7
    with torch.no_grad():
        lender.model.embed_tokens.weight.mul_(1.5)
        lender.model.layers[0].self_attn.q_proj.weight.mul_(0.5)
    take_over(engine_model, lender.named_parameters(), borrow=True)
    decoder.forget()
    torch.testing.assert_close(
        logits_of(decoder, ids), logits_of(ModuleDecoder(lender), ids), atol=2e-5, rtol=0
    )


def test_what_has_another_format_is_copied_into_the_engines_own(model):
    engine_model, lender = model("qwen3").to(torch.bfloat16), model("qwen3", seed=1)
    places = [parameter.data_ptr() for parameter in engine_model.parameters()]
    take_over(engine_model, lender.named_parameters(), borrow=True)
    assert [parameter.data_ptr() for parameter in engine_model.parameters()] == places
    assert torch.equal(engine_model.model.norm.weight, lender.model.norm.weight.bfloat16())
