"""What updates of a policy ask of the device: `update.py` prints JSON, by case. Attention is left
out: it has waits and copies of its own, and its kernels take a minute to compile.
"""

import dataclasses
import json
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from helpers.stub_device import Event, counts, reset, traced
from postgrad.algorithms.grpo import GRPO
from postgrad.core.ragged import Ragged
from postgrad.core.records import Experience, Sequences
from postgrad.layout.layout import Layout
from postgrad.learner.backbone import Backbone, MicroBatch
from postgrad.learner.optimizer import MasterOptimizer
from postgrad.learner.policy import PolicyLearner
from postgrad.learner.settings import LearnerSettings
from postgrad.learner.update import Update
from postgrad.models import head as of_models
from postgrad.models.attention import ATTENTION_NAME, AttentionContext
from postgrad.models.load import Loading, place
from postgrad.parallel.device import Placement, apply

CUDA = torch.device("cuda")
ENTRIES = 8064


class Values:
    """In place of attention: every query gets its own value."""

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, **_: Any) -> Tensor:
        return value.repeat_interleave(len(query) // len(value), 0).transpose(0, 1)


class Attentionless(Backbone):
    def _context(self, layout: Layout) -> AttentionContext:
        return Values()


def experience(samples: int, length: int) -> Experience:
    rng = np.random.default_rng(0)
    tokens = [rng.integers(3, 500, length) for _ in range(samples)]
    masks = [np.arange(length) > 0 for _ in tokens]
    advantages = [mask * np.float32(1.0) for mask in masks]
    sequences = Sequences(
        Ragged.of(tokens, np.int32), Ragged.of(masks, bool), np.arange(samples) // 2
    )
    columns = {"advantages": Ragged.of(advantages, np.float32)}
    return Experience(sequences, columns, np.ones(samples, bool))


def learner(vocabulary: int, tokens: int) -> PolicyLearner:
    config = AutoConfig.for_model(
        "qwen3", vocab_size=vocabulary, hidden_size=1024, intermediate_size=256,
        num_hidden_layers=1, num_attention_heads=16, num_key_value_heads=8, head_dim=128,
    )  # fmt: skip
    with CUDA:
        lm = AutoModelForCausalLM.from_config(
            config, attn_implementation=ATTENTION_NAME, dtype=torch.bfloat16
        )
    place(lm, "a model", Loading(torch.bfloat16, CUDA), gradient_checkpointing=False)
    backbone = Attentionless(lm, CUDA, MicroBatch(max_tokens=tokens))
    return PolicyLearner(backbone, LearnerSettings(), 10)


def asked(work: Callable[[], Any]) -> dict[str, Any]:
    """Counts of `work` at its second time, and its waits by the line of ours that asked."""
    work()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    reset()
    with traced(Event.WAIT, depth=1) as waits:
        work()
    above = torch.cuda.max_memory_allocated() - before
    return counts() | {"above": above, "from": dict(waits)}


def step(role: PolicyLearner, update: Update) -> None:
    role.update(update, GRPO()).result()  # pyright: ignore[reportCallIssue]


def updates() -> dict[str, Any]:
    """One update in one micro-batch, and in eight."""
    update = Update(experience(16, 128), np.arange(16))
    return {
        str(number): asked(lambda role=role: step(role, update))
        for number, role in ((1, learner(512, 2048)), (8, learner(512, 256)))
    }


def head() -> dict[str, Any]:
    """An update whose head reads many entries, in chunks as they are and in those of a CPU."""
    role = learner(151_936, ENTRIES + 64)
    update = Update(experience(16, ENTRIES // 16 + 1), np.arange(16))

    launches = {"as it is": asked(lambda: step(role, update))}
    of_models.CHUNK_BYTES["gpu"], of_models.CHUNK_ROWS["gpu"] = of_models.CHUNK_BYTES["cpu"], 1
    return launches | {"110 rows": asked(lambda: step(role, update))}


def clipping() -> dict[str, Any]:
    """The norm of 300 weights, whole and divided over ranks, of which this one is alone."""
    weights = {
        f"{number}.weight": nn.Parameter(torch.ones(8, 8, device=CUDA)) for number in range(300)
    }
    optimizer = MasterOptimizer(weights, LearnerSettings())
    for weight in weights.values():
        weight.grad = torch.ones_like(weight)
    unsharded = asked(lambda: optimizer._clip(1.0))
    optimizer.pieces = {
        name: dataclasses.replace(piece, cut=0, copies=1 + number % 2)
        for number, (name, piece) in enumerate(optimizer.pieces.items())
    }
    return {"whole": unsharded, "divided": asked(lambda: optimizer._clip(1.0))}


def eight_bits() -> dict[str, Any]:
    """A step of 100 matrices whose moments are in eight bits, of an adapter with LoRA+."""
    names = [f"layers.{n}.q_proj.lora_{kind}.default.weight" for n in range(50) for kind in "AB"]
    weights = {name: nn.Parameter(torch.ones(64, 64, device=CUDA)) for name in names}
    settings = LearnerSettings(optimizer_state="8bit", loraplus_lr_ratio=16.0)
    optimizer = MasterOptimizer(weights, settings)
    held = torch.cuda.memory_allocated()
    of_step = asked(lambda: optimizer.step(1e-3))
    return of_step | {"made by it": torch.cuda.memory_allocated() - held}


if __name__ == "__main__":
    apply(Placement("cuda", 1, deterministic=True))
    measurements = {"updates": updates(), "head": head(), "clipping": clipping()}
    print(json.dumps(measurements | {"eight bits": eight_bits()}))
