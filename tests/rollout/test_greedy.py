"""Greedy decoding against transformers' own, for every supported model type."""

import numpy as np
import pytest
import torch

from postgrad.rollout.engine import Request, generate
from postgrad.rollout.local.engine import LocalEngine
from postgrad.rollout.settings import SamplingSettings

NEW = 24
LENGTHS = [3, 17, 9, 1, 12]
KINDS = ["qwen2", "qwen3", "llama", "mistral", "gemma", "gemma2", "gemma3_text"]


def reference(lm, prompt):
    """transformers' greedy tokens, and the gap between the two best logits at each of them."""
    ids = torch.from_numpy(prompt.astype(np.int64))[None]
    out = lm.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=NEW,
        do_sample=False,
        return_dict_in_generate=True,
        output_logits=True,
    )
    logits = torch.cat(out.logits)
    best = logits.topk(2, -1).values
    tokens = out.sequences[0, ids.shape[1] :]
    logprobs = torch.log_softmax(logits, -1).gather(-1, tokens[:, None])[:, 0]
    return tokens.tolist(), (best[:, 0] - best[:, 1]).tolist(), logprobs.numpy()


@pytest.mark.parametrize(
    "kind",
    [
        kind if kind in ("qwen3", "gemma2") else pytest.param(kind, marks=pytest.mark.slow)
        for kind in KINDS
    ],
)
def test_greedy_tokens_are_those_of_transformers_generate(kind, model, prompt, tokenizer):
    prompts = [prompt(seed, length) for seed, length in enumerate(LENGTHS)]
    engine = LocalEngine(model(kind), tokenizer, slots=3, cache_tokens=3 * 48)
    sampling = SamplingSettings(temperature=0.0, max_new_tokens=NEW)
    done = generate(engine, [Request(i, (0,), p, sampling) for i, p in enumerate(prompts)])
    plain = model(kind, "eager")
    compared = 0
    for completion, ids in zip(done, prompts, strict=True):
        tokens, gaps, logprobs = reference(plain, ids)
        sure = next((i for i, gap in enumerate(gaps) if gap < 1e-3), len(gaps))
        assert completion.token_ids.tolist()[:sure] == tokens[:sure]
        np.testing.assert_allclose(completion.logprobs[:sure], logprobs[:sure], atol=2e-5)
        compared += sure
    assert compared > 60  # the weights are wide enough for the comparison to say something


@pytest.mark.parametrize("kind", ["qwen3", "gemma2"])
def test_bfloat16_decodes_with_the_logprobs_of_a_bfloat16_forward(kind, model, prompt, tokenizer):
    engine = LocalEngine(model(kind).to(torch.bfloat16), tokenizer, slots=2, cache_tokens=128)
    ids = prompt(1, 17)
    (done,) = generate(engine, [Request(0, (0,), ids, SamplingSettings(max_new_tokens=8))])
    (expected,) = engine.logprobs([np.concatenate([ids, done.token_ids])], 1.0)
    np.testing.assert_allclose(done.logprobs, expected[len(ids) :], atol=0.08)
