"""What a mixture of experts gains from router replay and from its balance loss, on a CPU.

    python benchmarks/mixtures.py --to benchmarks/results/mixtures.json

replay: the built-in engine samples from a fresh Qwen3-MoE of 4 layers, and a learner with the same
weights computes the logprobs of what was sampled, with the experts that its routers choose and with
those that the engine chose; in bfloat16 also with routers that compute in float32
(model.router_dtype). routed_apart: the share of choices (a token in a layer) that are another set
of experts. apart: |learner - sampler| in nats, over the sampled tokens. kl: the mean of
r - 1 - log r, with r the ratio of the two. choices: of the same mixtures in bfloat16, the share of
choices that are another set than float64 gives for the same hidden states and weights, by what
their routers compute in. balance: SFT of a fresh mixture of 8 experts, 1 a token, that predicts the
next of a cycle of tokens, with and without the balance loss: losses, the load of the busiest expert
(1: even) and the share of experts without a token.
"""

import argparse
import json
import shlex
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from postgrad.algorithms.sft import SFT
from postgrad.core.ragged import Ragged
from postgrad.core.records import Sequences
from postgrad.learner.backbone import Backbone, MicroBatch
from postgrad.learner.policy import PolicyLearner
from postgrad.learner.settings import LearnerSettings
from postgrad.learner.update import Update, chosen_experts
from postgrad.models.attention import ATTENTION_NAME
from postgrad.models.routers import Routers, give_dtype, replayable
from postgrad.models.settings import RouterDtype
from postgrad.parallel.ranks import ALONE
from postgrad.rollout.engine import Completion, Request, generate
from postgrad.rollout.local.engine import LocalEngine
from postgrad.rollout.settings import SamplingSettings

VOCABULARY, PROMPTS, SAMPLES = 512, 16, 4
REPLAYED: dict[str, tuple[torch.dtype, RouterDtype]] = {
    "bfloat16": (torch.bfloat16, "auto"),
    "bfloat16, routers in float32": (torch.bfloat16, "float32"),
    "float32": (torch.float32, "auto"),
}
MIXTURES = {"4 experts, 2 a token": (4, 2), "128 experts, 8 a token": (128, 8)}


class Numbers:
    """A tokenizer of a model that reads numbers."""

    eos_token_id = VOCABULARY - 1

    def batch_decode(self, ids: Any, **_: Any) -> list[str]:
        """No text."""
        return ["" for _ in ids]


def mixture(
    seed: int,
    dtype: torch.dtype,
    experts: int,
    each: int,
    layers: int,
    router_dtype: RouterDtype = "auto",
) -> Any:
    config = Qwen3MoeConfig(
        vocab_size=VOCABULARY, hidden_size=128, intermediate_size=256, moe_intermediate_size=96,
        num_hidden_layers=layers, num_attention_heads=4, num_key_value_heads=2, head_dim=32,
        num_experts=experts, num_experts_per_tok=each, initializer_range=0.1,
        eos_token_id=Numbers.eos_token_id, pad_token_id=0,
    )  # fmt: skip
    torch.manual_seed(seed)
    lm: Any = AutoModelForCausalLM.from_config(config)
    lm.set_attn_implementation(ATTENTION_NAME)
    lm = lm.to(dtype)
    give_dtype(lm, router_dtype)
    return lm


def policy_of(lm: Any, routers: Routers, updates: int = 1, lr: float = 1e-3) -> PolicyLearner:
    backbone = Backbone(lm, torch.device("cpu"), MicroBatch(max_tokens=2048))
    backbone.routers = routers
    backbone.divide(ALONE, "none")
    return PolicyLearner(backbone, LearnerSettings(lr=lr, warmup_ratio=0.0), updates)


def sample(lm: Any, new_tokens: int) -> tuple[Sequences, np.ndarray]:
    """What the engine draws, with its experts; and its logprobs, over all tokens."""
    engine = LocalEngine(
        lm, Numbers(), slots=16, cache_tokens=16 * (64 + new_tokens), records_experts=True
    )
    rng = np.random.default_rng(0)
    prompts = [rng.integers(1, VOCABULARY - 1, 24).astype(np.int32) for _ in range(PROMPTS)]
    sampling = SamplingSettings(max_new_tokens=new_tokens)
    numbers = tuple(range(SAMPLES))
    done: list[Completion] = generate(
        engine, [Request(t, numbers, prompt, sampling) for t, prompt in enumerate(prompts)]
    )
    tokens = [np.concatenate([prompts[c.ticket], c.token_ids]) for c in done]
    masks = [np.arange(len(row)) >= 24 for row in tokens]
    sequences = Sequences(
        Ragged.of(tokens, np.int32), Ragged.of(masks, bool), np.array([c.ticket for c in done]),
        Ragged.of([c.experts for c in done if c.experts is not None], np.int16),
    )  # fmt: skip
    logprobs = np.concatenate([np.concatenate([np.zeros(24), c.logprobs]) for c in done])
    return sequences, logprobs


def replay(name: str, sizes: tuple[int, int], new_tokens: int) -> dict[str, Any]:
    dtype, router_dtype = REPLAYED[name]
    models = (mixture(0, dtype, *sizes, 4, router_dtype) for _ in range(2))
    sequences, sampled = sample(next(models).eval(), new_tokens)
    mask, lm = sequences.loss_mask.values, next(models)
    figures: dict[str, Any] = {"tokens": int(mask.sum())}
    policy = policy_of(lm, replayable(lm))
    own_experts = np.sort(chosen_experts(policy.backbone, sequences).values, -1)
    assert sequences.experts is not None
    recorded_experts = np.sort(sequences.experts.values, -1)
    is_recorded = recorded_experts.min((1, 2)) >= 0
    figures["routed_apart"] = float((own_experts != recorded_experts).any(-1)[is_recorded].mean())
    for label, replays in (("off", False), ("sampled", True)):
        policy.backbone.routers = routers = policy.backbone.routers or Routers(lm)
        routers.replays = replays
        learned = policy.logprobs(sequences).result().values
        apart = (learned - sampled)[mask].astype(np.float64)
        figures[label] = {
            "apart_mean": float(np.abs(apart).mean()),
            "apart_p99": float(np.quantile(np.abs(apart), 0.99)),
            "apart_max": float(np.abs(apart).max()),
            "kl": float((np.expm1(apart) - apart).mean()),
        }
    return figures


@torch.no_grad()
def choices(experts: int, each: int, rows: int) -> dict[str, float]:
    """Over rows of 128 tokens that are drawn by lot."""
    apart: dict[str, float] = {}
    ids = torch.from_numpy(np.random.default_rng(0).integers(1, VOCABULARY - 1, (rows, 128)))
    for router_dtype in ("auto", "float32"):
        lm = mixture(0, torch.bfloat16, experts, each, 4, router_dtype).eval()
        lm.set_attn_implementation("eager")
        differ: list[Tensor] = []

        def compare(router: Any, inputs: Any, outputs: Any, differ: list[Tensor] = differ) -> None:
            exact = inputs[0].double() @ router.weight.double().t()
            best = exact.topk(each, -1).indices.sort(-1).values
            differ.append((best != outputs[2].sort(-1).values).any(-1))

        for layer in lm.model.layers:
            layer.mlp.gate.register_forward_hook(compare)
        for row in ids:
            lm(input_ids=row[None], use_cache=False)
        apart[router_dtype] = float(torch.cat(differ).double().mean())
    return apart | {"choices": 4 * ids.numel()}


def balance(coefficient: float, seed: int, updates: int) -> dict[str, list[float]]:
    """Rows are walks on a ring of 64 tokens, in steps that the first two tokens say."""
    lm = mixture(seed, torch.float32, experts=8, each=1, layers=2)
    policy, sft = policy_of(lm, Routers(lm, coefficient), updates, lr=3e-3), SFT()
    rng = np.random.default_rng(seed)
    curves: dict[str, list[float]] = {}
    for _ in range(updates):
        starts, steps = rng.integers(0, 64, 16), rng.integers(1, 8, 16)
        rows = [
            np.concatenate([[100 + step], (start + step * np.arange(24)) % 64]).astype(np.int32)
            for start, step in zip(starts, steps, strict=True)
        ]
        masks = [np.arange(25) > 1 for _ in rows]
        sequences = Sequences(Ragged.of(rows), Ragged.of(masks, bool), np.arange(16))
        report = policy.update(Update(sft.experience(sequences), np.arange(16)), sft).result()
        for metric in ("loss", "router_balance", "router_max_load", "router_unused"):
            value = round(float(report.metrics[f"policy/{metric}"]), 5)
            curves.setdefault(metric, []).append(value)
    return curves


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=96, help="of a sampled answer")
    parser.add_argument("--rows", type=int, default=2048, help="whose choices are compared")
    parser.add_argument("--updates", type=int, default=120, help="with and without a balance loss")
    parser.add_argument("--seeds", type=int, default=3, help="of the models with a balance loss")
    parser.add_argument("--to", type=Path, required=True)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    results = {
        "command": shlex.join(["python", *sys.argv]),
        "torch": torch.__version__,
        "replay": {
            mixture: {name: replay(name, sizes, arguments.tokens) for name in REPLAYED}
            for mixture, sizes in MIXTURES.items()
        },
        "choices": {name: choices(*sizes, arguments.rows) for name, sizes in MIXTURES.items()},
        "balance": {
            str(coefficient): [
                balance(coefficient, seed, arguments.updates) for seed in range(arguments.seeds)
            ]
            for coefficient in (0.0, 0.01)
        },
    }
    arguments.to.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
