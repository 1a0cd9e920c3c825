"""Packed, shared, unpadded against transformers' own forward: logits and gradients, every type."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import flex_attention
from transformers import AutoConfig, AutoModelForCausalLM

from postgrad.core.ragged import Ragged
from postgrad.core.records import Sequences
from postgrad.layout.blocks import plan_blocks
from postgrad.layout.layout import Layout, lay_out
from postgrad.models import head
from postgrad.models import tree as tree_module
from postgrad.models.attention import ATTENTION_NAME, AttentionContext, hidden_states
from postgrad.models.head import full_logits, target_logprobs
from postgrad.models.tree import FlexAttention, TreeAttention

SHORT_WINDOW = {"sliding_window": 8}
TYPES = {
    "qwen2": {},
    "qwen2-window": {"use_sliding_window": True, "max_window_layers": 1, **SHORT_WINDOW},
    "qwen3": {},
    "llama": {},
    "mistral": SHORT_WINDOW,
    "gemma": {},
    "gemma2": {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0, **SHORT_WINDOW},
    "gemma3_text": {
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        **SHORT_WINDOW,
    },
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2, **SHORT_WINDOW},
}
UNSHARED = 10**9


def model_of(name: str) -> torch.nn.Module:
    config = AutoConfig.for_model(
        name.removesuffix("-window"),
        vocab_size=61,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        initializer_range=0.2,  # logits well apart
        **TYPES[name],
    )
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config).eval()


@pytest.fixture(scope="module")
def sequences() -> Sequences:
    rng = np.random.default_rng(0)
    tokens, masks, group = [], [], []
    for number in range(3):
        prompt = rng.integers(0, 61, rng.integers(9, 20))
        for _ in range(3):
            response = rng.integers(0, 61, rng.integers(1, 20))
            tokens.append(np.concatenate([prompt, response]))
            masks.append([False] * len(prompt) + [True] * len(response))
            group.append(number)
    return Sequences(Ragged.of(tokens, np.int32), Ragged.of(masks, bool), np.array(group))


def gradients(lm: torch.nn.Module) -> torch.Tensor:
    flat = torch.cat([p.grad.flatten() for p in lm.parameters()])
    lm.zero_grad()
    return flat


def padded_logprobs(lm: torch.nn.Module, sequences: Sequences) -> torch.Tensor:
    """One batch, padded on the right, transformers' eager attention: the reference."""
    lm.set_attn_implementation("eager")
    ids = torch.nn.utils.rnn.pad_sequence(
        [torch.from_numpy(row.astype(np.int64)) for row in sequences.tokens], batch_first=True
    )
    lengths = torch.from_numpy(sequences.tokens.lengths)
    attention_mask = (torch.arange(ids.shape[1])[None] < lengths[:, None]).long()
    logprobs = torch.log_softmax(lm(ids, attention_mask=attention_mask).logits.float(), -1)
    return torch.cat(
        [
            logprobs[i, np.flatnonzero(mask) - 1, ids[i, np.flatnonzero(mask)]]
            for i, mask in enumerate(sequences.loss_mask)
        ]
    )


def packed_logprobs(
    lm: torch.nn.Module,
    sequences: Sequences,
    min_shared: int,
    context: Callable[[Layout], AttentionContext],
) -> torch.Tensor:
    """Through our attention, without padding, in the order of the reference."""
    layout = lay_out(sequences, np.arange(len(sequences)), min_shared=min_shared)
    hidden = hidden_states(
        lm,
        torch.from_numpy(layout.token_ids),
        torch.from_numpy(layout.positions),
        context(layout),
    )
    logprobs, _ = target_logprobs(lm, hidden[layout.hidden_row], torch.from_numpy(layout.target))
    in_order = torch.empty_like(logprobs)
    in_order[np.searchsorted(np.flatnonzero(sequences.loss_mask.values), layout.column)] = logprobs
    return in_order


def tree(layout: Layout) -> TreeAttention:
    return TreeAttention(plan_blocks(layout), torch.device("cpu"))


def narrow_flex(layout: Layout) -> FlexAttention:
    """What CUDA's attention makes of heads that its kernel refuses, as these of 8 numbers."""
    return FlexAttention(layout, torch.device("cpu"))


@pytest.mark.parametrize("context", [tree, narrow_flex])
@pytest.mark.parametrize("min_shared", [1, UNSHARED])
@pytest.mark.parametrize("name", TYPES)
def test_packed_logprobs_and_gradients_are_those_of_the_padded_forward(
    name: str,
    min_shared: int,
    context: Callable[[Layout], AttentionContext],
    sequences: Sequences,
):
    lm = model_of(name)
    weight = torch.linspace(-1.0, 1.0, int(sequences.loss_mask.values.sum()))
    expected = padded_logprobs(lm, sequences)
    (weight * expected).sum().backward()
    expected_gradient = gradients(lm)

    lm.set_attn_implementation(ATTENTION_NAME)
    in_order = packed_logprobs(lm, sequences, min_shared, context)
    (weight * in_order).sum().backward()
    gradient = gradients(lm)

    torch.testing.assert_close(in_order, expected, atol=3e-5, rtol=1e-5)
    assert (gradient - expected_gradient).norm() <= 1e-5 * expected_gradient.norm()


@pytest.mark.parametrize("name", TYPES)
def test_flex_attentions_mask_gives_the_logprobs_of_the_padded_forward(
    name: str, sequences: Sequences, monkeypatch: pytest.MonkeyPatch
):
    """torch computes it uncompiled here, forward only."""
    lm = model_of(name)
    expected = padded_logprobs(lm, sequences)
    lm.set_attn_implementation(ATTENTION_NAME)
    kernels = []

    def uncompiled(*args: Tensor, **options: Any) -> Tensor:
        kernels.append(options["kernel_options"])
        return flex_attention(*args, **options)

    module = "torch.nn.attention.flex_attention"
    monkeypatch.setattr(f"{module}._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)  # saves seconds
    monkeypatch.setattr(tree_module, "NARROWEST", 1)
    monkeypatch.setattr(tree_module, "_kernel", lambda: uncompiled)
    with torch.no_grad():
        logprobs = packed_logprobs(lm, sequences, 1, narrow_flex)
    torch.testing.assert_close(logprobs, expected, atol=3e-5, rtol=1e-5)
    assert kernels == [{"BACKEND": "TRITON"}] * 3  # a layer each, and never the one for decoding


@pytest.mark.parametrize("heads", [2, 8])
def test_one_context_attends_in_every_dtype_and_number_of_heads(sequences: Sequences, heads: int):
    layout = lay_out(sequences, np.arange(len(sequences)))
    drawn = torch.Generator().manual_seed(0)
    used = tree(layout)
    for number, dtype in ((4, torch.float32), (heads, torch.float64)):
        shapes = [(number, layout.n_tokens, 8)] + [(2, layout.n_tokens, 8)] * 2
        inputs = [torch.randn(shape, generator=drawn, dtype=dtype) for shape in shapes]
        fresh, again = (
            each.attend(0, *inputs, scale=0.3, window=None, softcap=None)
            for each in (tree(layout), used)
        )
        assert again.dtype == dtype
        torch.testing.assert_close(again, fresh, atol=0, rtol=0)


def test_sharing_computes_prompts_once(sequences: Sequences):
    rows = np.arange(len(sequences))
    saved = sum(
        2 * (len(row) - int(mask.sum()))
        for row, mask in list(zip(sequences.tokens, sequences.loss_mask, strict=True))[::3]
    )
    unshared = lay_out(sequences, rows, min_shared=UNSHARED).n_tokens
    assert lay_out(sequences, rows).n_tokens == unshared - saved


@pytest.mark.parametrize("name", ["qwen3", "gemma2"])
def test_the_head_in_chunks_is_the_head_at_once(name: str, monkeypatch: pytest.MonkeyPatch):
    lm = model_of(name)
    hidden = torch.randn(50, 32, generator=torch.Generator().manual_seed(0), requires_grad=True)
    targets = torch.arange(50)
    logits = full_logits(lm, hidden) / 0.7
    expected = torch.log_softmax(logits, -1)[torch.arange(50), targets]
    entropy = torch.distributions.Categorical(logits=logits).entropy()
    (expected.sum() + entropy.square().sum()).backward()
    gradient = hidden.grad.clone()
    hidden.grad = None

    monkeypatch.setitem(head.CHUNK_BYTES, "cpu", 4 * 61 * 7)
    got, got_entropy = target_logprobs(lm, hidden, targets, temperature=0.7, with_entropy=True)
    (got.sum() + got_entropy.square().sum()).backward()
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(got_entropy, entropy, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(hidden.grad, gradient, atol=1e-5, rtol=1e-4)


def test_soft_capped_logits_are_those_of_transformers():
    lm = model_of("gemma2")
    lm.set_attn_implementation("eager")
    ids = torch.arange(12)[None]
    torch.testing.assert_close(
        full_logits(lm, lm.model(ids).last_hidden_state[0]), lm(ids).logits[0]
    )
    assert full_logits(lm, torch.randn(4, 32)).abs().max() < 3.0
