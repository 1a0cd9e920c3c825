"""One GRPO update of models whose layers carry a state along the sequence: with prompts that n
samples share, against a copy of the prompt for each sample.

    python benchmarks/hybrids.py --rounds 5 --to benchmarks/results/hybrids.json

Fresh float32 models of two types: Qwen3-Next-like (three gated delta rules and one attention layer)
and Mamba2-like (four state spaces), without the kernels of flash-linear-attention and mamba-ssm.
Both sides have the same weights, samples, loss and token budget, and differ in the layouts alone:
`Backbone.min_shared`. Rounds alternate. Reported are medians of seconds for each length of prompt,
computed tokens, and how far the two first updates are apart: it is the same update.
"""

import argparse
import json
import platform
import shlex
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from transformers import AutoModelForCausalLM, Mamba2Config, Qwen3NextConfig

from postgrad.algorithms.grpo import GRPO
from postgrad.core.ragged import Ragged
from postgrad.core.records import Experience, Sequences
from postgrad.layout.tree import NO_SHARING
from postgrad.learner.backbone import Backbone, MicroBatch
from postgrad.learner.policy import PolicyLearner
from postgrad.learner.settings import LearnerSettings
from postgrad.learner.update import Update
from postgrad.models.attention import ATTENTION_NAME
from postgrad.models.states import carry_states

SAMPLES, ANSWER, VOCABULARY = 8, 64, 1024
SHORTEST = {"shared": 2, "copies": NO_SHARING}  # prefix that is shared, in tokens
CONFIGS = {
    "qwen3_next": Qwen3NextConfig(
        vocab_size=VOCABULARY, hidden_size=128, intermediate_size=384, num_hidden_layers=4,
        num_attention_heads=4, num_key_value_heads=2, head_dim=32, linear_num_key_heads=2,
        linear_num_value_heads=4, linear_key_head_dim=32, linear_value_head_dim=32,
        mlp_only_layers=[0, 1, 2, 3],
    ),
    "mamba2": Mamba2Config(
        vocab_size=VOCABULARY, hidden_size=128, num_hidden_layers=4, num_heads=8, head_dim=32,
        n_groups=1, state_size=32, chunk_size=64,
    ),
}  # fmt: skip


def samples(prompt: int, budget: int) -> Experience:
    """As many prompts of about `prompt` tokens as fill a micro-batch of `budget` tokens with
    copies of them, each with SAMPLES answers of 1 to 2 * ANSWER tokens.
    """
    rng = np.random.default_rng(0)
    tokens, masks, group, advantages = [], [], [], []
    for number in range(max(1, round(budget / SAMPLES / (prompt + ANSWER)))):
        opening = rng.integers(3, VOCABULARY, max(2, round(prompt * rng.uniform(0.9, 1.1))))
        for _ in range(SAMPLES):
            answer = rng.integers(3, VOCABULARY, rng.integers(1, 2 * ANSWER))
            tokens.append(np.concatenate([opening, answer]))
            masks.append(np.arange(len(tokens[-1])) >= len(opening))
            group.append(number)
            advantages.append(masks[-1] * np.float32(rng.normal()))
    sequences = Sequences(Ragged.of(tokens, np.int32), Ragged.of(masks, bool), np.array(group))
    columns = {"advantages": Ragged.of(advantages, np.float32)}
    return Experience(sequences, columns, np.ones(len(tokens), np.bool_))


class Side:
    """A learner whose layouts share prefixes of `shortest` tokens and more."""

    def __init__(self, kind: str, shortest: int, budget: int) -> None:
        self.lm = fresh(kind)
        self.backbone = Backbone(self.lm, torch.device("cpu"), MicroBatch(max_tokens=budget))
        self.backbone.min_shared = shortest
        settings = LearnerSettings(lr=1e-6, eps=1e-6, max_grad_norm=0.0)
        self.learner = PolicyLearner(self.backbone, settings, 100)

    def update(self, experience: Experience) -> float:
        """Seconds of an update."""
        began = time.perf_counter()
        self.learner.update(Update(experience, np.arange(len(experience))), GRPO()).result()
        return time.perf_counter() - began

    def tokens(self, experience: Experience) -> int:
        """Tokens that an update computes."""
        rows = np.arange(len(experience))
        layouts = self.backbone.micro_batches(experience.sequences, rows)
        return sum(layout.n_tokens for layout in layouts)


def fresh(kind: str) -> Any:
    """The same weights every time."""
    torch.manual_seed(0)
    lm = AutoModelForCausalLM.from_config(CONFIGS[kind], attn_implementation=ATTENTION_NAME)
    carry_states(lm)
    return lm.eval()


def distance(model: Any, two: Any, kind: str) -> float:
    """Relative distance of the weights' movement from the common start."""
    start = torch.cat([p.detach().flatten() for p in fresh(kind).parameters()])
    a, b = (
        torch.cat([p.detach().flatten() for p in lm.parameters()]) - start for lm in (model, two)
    )
    return float((a - b).norm() / b.norm())


def measured(kind: str, prompt: int, rounds: int, budget: int) -> dict[str, Any]:
    """Both sides with one length of prompt."""
    experience = samples(prompt, budget)
    sides = {name: Side(kind, shortest, budget) for name, shortest in SHORTEST.items()}
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for side in sides.values():  # warms up
        side.update(experience)
    apart = distance(*(side.lm for side in sides.values()), kind)
    for _ in range(rounds):
        for name, side in sides.items():
            seconds[name].append(side.update(experience))
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    return {
        "type": kind,
        "prompt": prompt,
        "prompts": int(experience.sequences.group[-1]) + 1,
        "tokens": {name: side.tokens(experience) for name, side in sides.items()},
        "seconds": seconds,
        "medians": medians,
        "ratio": medians["copies"] / medians["shared"],
        "first_update_distance": apart,
    }


def main() -> None:
    """Measures and prints one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--prompts", type=int, nargs="+", default=[16, 64, 256, 1024])
    parser.add_argument("--budget", type=int, default=4096, help="tokens in one forward")
    parser.add_argument("--to", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    report = {
        "command": shlex.join([Path(sys.executable).name, *sys.argv]),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "machine": platform.machine(),
        "samples": SAMPLES,
        "mean_answer": ANSWER,
        "tokens_in_one_forward": options.budget,
        "cases": [
            measured(kind, prompt, options.rounds, options.budget)
            for kind in CONFIGS
            for prompt in options.prompts
        ],
    }
    text = json.dumps(report, indent=2)
    print(text)
    if options.to:
        options.to.write_text(text + "\n", "utf-8")


if __name__ == "__main__":
    main()
