"""What the built-in engine asks of the device in each decode step, at the shapes of Qwen3-0.6B with
256 rows. Prints JSON.

    decode.py steps       counts of each step, and the samples that ended in it; nothing is computed
                          on the stub, so every token is token 0
    decode.py publishes   graphs captured in a batch at first, again, after a publish, after sleep,
                          and of weights that lie elsewhere since another publish
    decode.py turns TYPE  tokens of prompts that first and second turns compute, and what the step
                          that begins the second turns asks for: of Qwen3's layers, of DeepSeek's,
                          whose cache keeps latents, or of Qwen3.5's, which carry states
    decode.py kernels     how the kernels of attention compile, by size of head and dtype
"""

import json
import sys
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM, Qwen3Config

from helpers.stub_device import Event, counts, reset, traced
from postgrad.models.states import carry_states
from postgrad.parallel.device import Placement, apply
from postgrad.rollout.engine import Completion, Request
from postgrad.rollout.local import engine as local
from postgrad.rollout.local.cache import KeyValueCache, LayerShape
from postgrad.rollout.local.engine import LocalEngine
from postgrad.rollout.local.paged import PagedDecoding
from postgrad.rollout.settings import SamplingSettings

ROWS, SAMPLES, LONGEST = 256, 8, 200
SHAPE = {
    "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28,
    "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936,
    "tie_word_embeddings": True,
}  # fmt: skip

SMALL: dict[str, dict[str, Any]] = {
    "deepseek_v3": {
        "num_key_value_heads": 16, "head_dim": 64, "q_lora_rank": None, "kv_lora_rank": 512,
        "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128,
        "first_k_dense_replace": 4,
    },
    "qwen3_5_text": {},
}  # fmt: skip


class NoText:
    """A tokenizer whose end token is never drawn."""

    eos_token_id = 2

    def batch_decode(self, rows: list[Any], **_: Any) -> list[str]:
        return [""] * len(rows)


def engine(
    dtype: torch.dtype = torch.bfloat16, layers: int = 28, kind: str = "qwen3"
) -> LocalEngine:
    import postgrad.models.attention  # noqa: F401  registers our attention

    config = Qwen3Config(**SHAPE | {"num_hidden_layers": layers})
    if kind != "qwen3":
        sizes = SHAPE | {"num_hidden_layers": layers, "vocab_size": 32000} | SMALL[kind]
        config = AutoConfig.for_model(kind, **sizes)
    with torch.device("cuda"):
        lm = AutoModelForCausalLM.from_config(config, attn_implementation="postgrad", dtype=dtype)
    carry_states(lm)
    local.require_same_samples = lambda *_: None  # nothing is computed on the stub
    return LocalEngine(lm, NoText(), slots=ROWS, cache_tokens=ROWS * (128 + 256))


def fill(model: LocalEngine, **sampling: Any) -> None:
    """Each prompt's samples end one step after those of the prompt before it, from 40 steps on."""
    for ticket in range(ROWS // SAMPLES):
        limit = min(40 + ticket, LONGEST)
        prompt = np.arange(100 + ticket % 20, dtype=np.int32)
        settings = SamplingSettings(max_new_tokens=limit, **sampling)
        model.submit(Request(ticket, tuple(range(SAMPLES)), prompt, settings))


def steps(**sampling: Any) -> dict[str, Any]:
    model = engine()
    model.logprobs([np.arange(100, dtype=np.int32)], 1.0)  # compiles the attention of prompts
    fill(model, **sampling)
    each: list[dict[str, int]] = []
    ended: list[int] = []
    with traced(Event.WAIT | Event.PAGEABLE, depth=2) as waits:
        for _ in range(60):
            reset()
            ended.append(len(model.advance()))
            each.append(counts())
    return {"steps": each, "ended": ended, "waits": dict(waits)}


def publishes() -> dict[str, int]:
    model = engine(layers=2)

    def captures() -> int:
        reset()
        fill(model)
        while model.completed():
            pass
        return counts()["captures"]

    captured = {"first": captures(), "again": captures()}
    weights = {name: weight.clone() for name, weight in model._lm.named_parameters()}
    model.load_weights(weights.items(), 1)
    captured["after a publish"] = captures()
    model.sleep()
    captured["after a rest"] = captures()
    model._borrows = True  # of norms, whose memory is theirs alone
    model.load_weights(weights.items(), 2)
    captured["of weights elsewhere"] = captures()
    return captured


def turns(kind: str) -> dict[str, Any]:
    """32 samples write 20 tokens; replies of 30, all different, come when all have ended."""
    model, sampling = engine(layers=4, kind=kind), SamplingSettings(max_new_tokens=20)
    prompts = [np.arange(100 + ticket, dtype=np.int32) for ticket in range(4)]
    for ticket, prompt in enumerate(prompts):
        model.submit(Request(ticket, tuple(range(SAMPLES)), prompt, sampling, may_go_on=True))
    done: list[Completion] = []
    while completions := model.completed():
        done += completions
    first = model.stats.prompt_tokens
    for c in done:
        reply = np.full(30, 3 + SAMPLES * c.ticket + c.sample, np.int32)
        prefix = np.concatenate([prompts[c.ticket], c.token_ids, reply])
        model.submit(Request(c.ticket, (c.sample,), prefix, sampling, 1))
    reset()
    model.advance()
    begun, ended = counts(), 0
    while completions := model.completed():
        ended += len(completions)
    asked = {name: begun[name] for name in ("launches", "waits", "refused")}
    computed = [first, model.stats.prompt_tokens - first]
    return {"computed": computed, "ended": ended, "begun": asked}


def kernels() -> dict[str, Any]:
    """Heads and groups as models have them; a window and a soft-cap, as some have them. The last
    two are latents of DeepSeek's sizes.
    """
    device = torch.device("cuda")
    asked: dict[str, int] = {}
    for dtype in (torch.float32, torch.bfloat16):
        for heads, dim, groups in (
            (2, 64, 7), (2, 128, 2), (2, 128, 8), (2, 256, 4), (2, 80, 1), (1, 576, 16),
            (1, 576, 128),
        ):  # fmt: skip
            for window, softcap in ((None, None), (64, 30.0)):
                latent = dim == 576
                shape = LayerShape(heads, dim, 512 if latent else dim, latent)
                cache = KeyValueCache((shape,), 16 * 128, dtype, device)
                cache.divide(16, 64, 64)
                numbers = {
                    name: torch.zeros(16, dtype=torch.int64, device=device)
                    for name in ("written", "prompt", "response", "length", "used", "stretch")
                }
                lanes = torch.zeros(256, dtype=torch.int64, device=device)
                context = PagedDecoding(cache, row_of_lane=lanes, rows=16, **numbers)
                query = torch.zeros(heads * groups, 16, dim, dtype=dtype, device=device)
                new = torch.zeros(heads, 16, dim, dtype=dtype, device=device)
                value = new[..., : shape.value_dim]
                reset()
                context.attend(0, query, new, value, scale=0.1, window=window, softcap=softcap)
                name = f"{dtype} {dim} x {groups} {window} {softcap}".removeprefix("torch.")
                asked[name] = counts()["launches"]
    return asked


if __name__ == "__main__":
    apply(Placement("cuda", 1, True))
    if sys.argv[1] == "kernels":
        print(json.dumps(kernels()))
    elif sys.argv[1] == "publishes":
        print(json.dumps(publishes()))
    elif sys.argv[1] == "turns":
        print(json.dumps(turns(sys.argv[2])))
    else:
        filters = {"top_k": 8, "top_p": 0.9} if sys.argv[1] == "filters" else {}
        print(json.dumps(steps(**filters)))
