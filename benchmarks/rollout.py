"""The built-in rollout engine against transformers' generate, in one process, taking turns.

    python benchmarks/rollout.py --shape gsm8k --rounds 5 --threads 2 --to rollout.json

Both sample every response to its full length (no end token) from the same fresh model with the same
prompts at temperature 1, in float32. Rounds alternate A B A B, so that a busy machine hits both.
The JSON has the command, every round's seconds, the medians, and the ratio of the medians.
"""

import argparse
import json
import os
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
from transformers import AutoModelForCausalLM, GenerationConfig, Qwen2Config, Qwen3Config

import postgrad.models.attention  # noqa: F401  registers our attention
from postgrad.rollout.engine import Request, generate
from postgrad.rollout.local.engine import LocalEngine
from postgrad.rollout.local.sizes import probe_sizes
from postgrad.rollout.settings import RolloutSettings, SamplingSettings

SHAPES: dict[str, dict[str, Any]] = {
    "gsm8k": {
        "config": lambda: Qwen2Config(
            vocab_size=4096, hidden_size=256, intermediate_size=768, num_hidden_layers=6,
            num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=True,
        ),
        "prompts": 16, "samples": 4, "new_tokens": 128, "prompt_tokens": (80, 240),
    },
    "quickstart": {
        "config": lambda: Qwen3Config(
            vocab_size=113, hidden_size=128, intermediate_size=384, num_hidden_layers=4,
            num_attention_heads=4, num_key_value_heads=2, head_dim=32, tie_word_embeddings=True,
        ),
        "prompts": 64, "samples": 8, "new_tokens": 12, "prompt_tokens": (16, 24),
    },
}  # fmt: skip


class NoText:
    """A tokenizer that ends nothing and decodes nothing: both sides are timed without text."""

    eos_token_id = -1

    def batch_decode(self, rows: list[Any], skip_special_tokens: bool) -> list[str]:
        """One empty text a row."""
        return [""] * len(rows)


def fresh(shape: dict[str, Any], attention: str) -> Any:
    """The shape's model; the same weights under any attention."""
    config = shape["config"]()
    config._attn_implementation = attention
    torch.manual_seed(0)
    lm = AutoModelForCausalLM.from_config(config).eval()
    lm.generation_config = GenerationConfig(pad_token_id=0)
    return lm


def engine_rounds(shape: dict[str, Any], prompts: list[Any], slots: int | None) -> Any:
    """A function that samples everything once with the built-in engine; returns tokens."""
    lm = fresh(shape, "postgrad")
    sampling = SamplingSettings(max_new_tokens=shape["new_tokens"])
    sizes = probe_sizes(
        lm,
        RolloutSettings(slots=slots),
        sequences=len(prompts) * shape["samples"],
        max_len=max(len(p) for p in prompts) + shape["new_tokens"],
    )
    engine = LocalEngine(lm, NoText(), slots=sizes.slots, cache_tokens=sizes.cache_tokens)
    samples = tuple(range(shape["samples"]))

    def run() -> int:
        requests = [Request(i, samples, p, sampling) for i, p in enumerate(prompts)]
        return sum(len(c.token_ids) for c in generate(engine, requests))

    return run


def generate_rounds(shape: dict[str, Any], prompts: list[Any]) -> Any:
    """The same through transformers: one padded batch, the prompts repeated for their samples."""
    lm = fresh(shape, "sdpa")
    width = max(len(p) for p in prompts)
    rows = [p for p in prompts for _ in range(shape["samples"])]
    ids = torch.tensor(np.stack([np.pad(p, (width - len(p), 0)) for p in rows]), dtype=torch.long)
    mask = torch.tensor(np.stack([np.arange(width) >= width - len(p) for p in rows])).long()
    config = GenerationConfig(
        max_new_tokens=shape["new_tokens"], do_sample=True, top_k=0, pad_token_id=0
    )

    def run() -> int:
        with torch.no_grad():
            out = lm.generate(input_ids=ids, attention_mask=mask, generation_config=config)
        return out[:, width:].numel()

    return run


def summary(seconds: list[float], tokens: int) -> dict[str, Any]:
    """Medians of one side."""
    median = statistics.median(seconds)
    return {
        "seconds": [round(s, 4) for s in seconds],
        "median_seconds": round(median, 4),
        "response_tokens": tokens,
        "tokens_per_second": round(tokens / median, 1),
    }


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="The rollout engine against transformers.")
    parser.add_argument("--shape", choices=SHAPES, default="gsm8k")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--slots", type=int)
    parser.add_argument("--prompts", type=int)
    parser.add_argument("--samples", type=int)
    parser.add_argument("--new-tokens", type=int)
    parser.add_argument("--to", type=Path, help="where the JSON goes; default: standard output")
    return parser.parse_args()


def alternate(sides: dict[str, Any], rounds: int) -> dict[str, dict[str, Any]]:
    """Every side once to warm up, then in turns."""
    tokens = {name: run() for name, run in sides.items()}
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(rounds):
        for name, run in sides.items():
            started = time.perf_counter()
            run()
            seconds[name].append(time.perf_counter() - started)
    return {name: summary(seconds[name], tokens[name]) for name in sides}


def main() -> None:
    args = arguments()
    torch.set_num_threads(args.threads)
    given = {k: getattr(args, k) for k in ("prompts", "samples", "new_tokens") if getattr(args, k)}
    shape = SHAPES[args.shape] | given
    random = np.random.default_rng(0)
    low, high = shape["prompt_tokens"]
    prompts = [
        random.integers(2, 100, length).astype(np.int32)
        for length in random.integers(low, high + 1, shape["prompts"])
    ]
    sides = {
        "postgrad": engine_rounds(shape, prompts, args.slots),
        "transformers": generate_rounds(shape, prompts),
    }
    found = alternate(sides, args.rounds)
    result = {
        "command": shlex.join(["python", *sys.argv]),
        "shape": {k: v for k, v in shape.items() if k != "config"},
        "threads": args.threads,
        "cores": os.cpu_count(),
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
        **found,
        "ratio": round(
            found["transformers"]["median_seconds"] / found["postgrad"]["median_seconds"], 2
        ),
    }
    text = json.dumps(result, indent=1)
    if args.to:
        args.to.write_text(text + "\n")
    else:
        print(text)


if __name__ == "__main__":
    main()
