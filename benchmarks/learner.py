"""One GRPO update by postgrad's learner against a padded, unshared transformers update.

    python benchmarks/learner.py --rounds 5 --threads 2 --to learner.json

The same fresh 6M-parameter model, samples (--prompts x 8 responses, lengths from one seeded list),
float32, loss and AdamW on both sides; each side in micro-batches of its own kind: postgrad packs
trees of segments into a token budget, the padded side takes 8 samples at a time, one prompt's
group, padded to its longest. Rounds alternate. Reported are medians of seconds, their ratio, and
how far the two movements of the weights are apart: it is the same update.
"""

import argparse
import json
import platform
import shlex
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from transformers import AutoModelForCausalLM, Qwen2Config

from postgrad.algorithms.grpo import GRPO
from postgrad.core.ragged import Ragged
from postgrad.core.records import Experience, Sequences
from postgrad.learner.backbone import Backbone, MicroBatch
from postgrad.learner.policy import PolicyLearner
from postgrad.learner.settings import LearnerSettings
from postgrad.learner.update import Update
from postgrad.models.attention import ATTENTION_NAME

SAMPLES, VOCABULARY = 8, 4096


def fresh(attention: str) -> Any:
    """The same weights every time."""
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=VOCABULARY, hidden_size=256, intermediate_size=768, num_hidden_layers=6,
        num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=True,
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config, attn_implementation=attention)


def samples(prompts: int, without_gradient: float) -> Experience:
    """GSM8K-like lengths: prompts of 80 to 240 tokens, responses of at most 128, mean 64."""
    rng = np.random.default_rng(0)
    tokens, masks, group, advantages = [], [], [], []
    for number in range(prompts):
        prompt = rng.integers(3, VOCABULARY, rng.integers(80, 240))
        for _ in range(SAMPLES):
            response = rng.integers(3, VOCABULARY, rng.integers(1, 129))
            mask = np.arange(len(prompt) + len(response)) >= len(prompt)
            equal = number < without_gradient * prompts
            tokens.append(np.concatenate([prompt, response]))
            masks.append(mask)
            group.append(number)
            advantages.append(mask * np.float32(0.0 if equal else rng.normal()))
    sequences = Sequences(Ragged.of(tokens, np.int32), Ragged.of(masks, bool), np.array(group))
    columns = {"advantages": Ragged.of(advantages, np.float32)}
    has_gradient = np.array([bool(a.any()) for a in advantages])
    return Experience(sequences, columns, has_gradient)


def postgrad_update(experience: Experience, budget: int) -> tuple[Callable[[], None], Any]:
    """An update, and the model whose weights it moves."""
    lm = fresh(ATTENTION_NAME)
    backbone = Backbone(lm, torch.device("cpu"), MicroBatch(max_tokens=budget))
    learner = PolicyLearner(backbone, LearnerSettings(lr=1e-6, max_grad_norm=0.0), 100)
    update, algorithm = Update(experience, np.arange(len(experience))), GRPO()
    return lambda: (learner.update(update, algorithm).result(), None)[1], lm


def padded_update(experience: Experience) -> tuple[Callable[[], None], Any]:
    """What a plain trainer does: every sample whole, padded, all of them back-propagated."""
    lm = fresh("sdpa")
    optimizer = torch.optim.AdamW(lm.parameters(), lr=1e-6, weight_decay=0.0, fused=True)
    sequences, advantages = experience.sequences, experience.columns["advantages"]

    def pad(column: Ragged, rows: range, dtype: torch.dtype) -> torch.Tensor:
        parts = [torch.from_numpy(column.row(row)).to(dtype) for row in rows]
        return torch.nn.utils.rnn.pad_sequence(parts, batch_first=True)

    def update() -> None:
        for start in range(0, len(experience), SAMPLES):
            rows = range(start, start + SAMPLES)
            ids = pad(sequences.tokens, rows, torch.int64)
            mask = pad(sequences.loss_mask, rows, torch.float32)[:, 1:]
            advantage = pad(advantages, rows, torch.float32)[:, 1:]
            lengths = torch.tensor([len(sequences.tokens.row(row)) for row in rows])
            attended = (torch.arange(ids.shape[1])[None] < lengths[:, None]).long()
            logits = lm(ids, attention_mask=attended).logits[:, :-1].float()
            logprobs = torch.log_softmax(logits, -1).gather(-1, ids[:, 1:, None])[..., 0]
            ratio = torch.exp(logprobs - logprobs.detach())
            per_sample = (-ratio * advantage * mask).sum(-1) / mask.sum(-1)
            (per_sample.sum() / len(experience)).backward()
        optimizer.step()
        optimizer.zero_grad()

    return update, lm


def distance(model: Any, two: Any) -> float:
    """Relative distance of the weights' movement from the common start."""
    start = torch.cat([p.detach().flatten() for p in fresh("sdpa").parameters()])
    a, b = (
        torch.cat([p.detach().flatten() for p in lm.parameters()]) - start for lm in (model, two)
    )
    return float((a - b).norm() / b.norm())


def main() -> None:
    """Measures and prints one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--prompts", type=int, default=16, help="of the update, 8 samples each")
    parser.add_argument("--budget", type=int, default=8192, help="tokens in one forward")
    parser.add_argument("--without-gradient", type=float, default=0.0, help="share of groups")
    parser.add_argument("--to", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    experience = samples(options.prompts, options.without_gradient)
    sides = {
        "postgrad": postgrad_update(experience, options.budget),
        "padded": padded_update(experience),
    }
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    apart = None
    for number in range(options.rounds + 1):  # the first round warms up
        for name, (update, _) in sides.items():
            began = time.perf_counter()
            update()
            if number:
                seconds[name].append(time.perf_counter() - began)
        if apart is None:
            apart = distance(*(lm for _, lm in sides.values()))
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    report = {
        "command": shlex.join([Path(sys.executable).name, *sys.argv]),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "machine": platform.machine(),
        "samples": len(experience),
        "sample_tokens": len(experience.sequences.tokens.values),
        "seconds": seconds,
        "medians": medians,
        "ratio": medians["padded"] / medians["postgrad"],
        "first_update_distance": apart,
    }
    text = json.dumps(report, indent=2)
    print(text)
    if options.to:
        options.to.write_text(text + "\n", "utf-8")


if __name__ == "__main__":
    main()
