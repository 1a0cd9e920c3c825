"""What episodes of several turns cost the built-in engine, with and without what it keeps of a
sample between two turns.

    python -m benchmarks.turns --data DIR --to benchmarks/results/turns.json
    python -m benchmarks.turns --data DIR --type qwen3_5_text

The model of `python -m benchmarks.speed` (6M parameters, fresh, 4 096 tokens) plays 32 episodes on
one thread in float32: 8 samples of each of 4 questions, up to 8 turns of at most 32 tokens, and
replies of 32 tokens. Every reply enters as soon as its turn has ended. Both kinds take turns, after
one round of each that does not count. `--type`: a fresh model of the same width and depth whose
layers carry a state along the sequence (Qwen3.5's delta rules), or whose cache keeps latents
(DeepSeek's). Ratios are of CPU seconds of the same round. DIR has
gsm8k.jsonl and hh-rlhf-harmless.jsonl.gz, of which the tokenizer is made.
"""

import argparse
import statistics
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.speed.report import machine, write_result
from benchmarks.speed.side import read_work
from benchmarks.speed.workload import VOCABULARY, make
from postgrad.models.load import load_model
from postgrad.rollout.engine import Request
from postgrad.rollout.local.engine import LocalEngine
from postgrad.rollout.settings import SamplingSettings

PROMPTS = 4
SAMPLES = 8  # of each
SIZES = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "tie_word_embeddings", "bos_token_id", "eos_token_id", "pad_token_id",
)  # fmt: skip
TYPES: dict[str, dict[str, Any]] = {
    "qwen3_5_text": {
        "head_dim": 64, "linear_num_key_heads": 4, "linear_num_value_heads": 4,
        "linear_key_head_dim": 64, "linear_value_head_dim": 64,
    },
    "deepseek_v3": {
        "num_key_value_heads": 4, "q_lora_rank": None, "kv_lora_rank": 64, "qk_rope_head_dim": 32,
        "qk_nope_head_dim": 32, "v_head_dim": 64, "first_k_dense_replace": 100,
    },
}  # fmt: skip


def write_model(folder: Path, kind: str) -> None:
    """In place of the model of a folder a fresh one of another type, of the same sizes."""
    plain = AutoConfig.from_pretrained(folder)
    sizes = {name: getattr(plain, name) for name in SIZES}
    config = AutoConfig.for_model(kind, **{**sizes, **TYPES[kind]})
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)


class Episodes:
    """The engine, its prompts, and how long episodes are."""

    def __init__(self, folder: Path, data: Path, turns: int, tokens: int, kind: str | None) -> None:
        self._turns, self._tokens = turns, tokens  # tokens: of a turn and of a reply, at most
        make(folder, data, "6m", VOCABULARY, prompts=PROMPTS)
        if kind is not None:
            write_model(folder / "model", kind)
        model = load_model(str(folder / "model"), dtype=torch.float32)
        self._prompts = [np.array(ids, np.int32) for ids in read_work(folder)["prompts"]]
        slots = PROMPTS * SAMPLES
        longest = max(map(len, self._prompts)) + 2 * turns * tokens + 64
        self._engine = LocalEngine(
            model.lm, model.tokenizer, slots=slots, cache_tokens=slots * longest
        )

    def play(self, seed: int, *, keeps: bool) -> dict[str, float]:
        """All episodes once."""
        settings = SamplingSettings(max_new_tokens=self._tokens)
        draws, stats = np.random.default_rng(seed), self._engine.stats
        replies = draws.integers(10, VOCABULARY, (self._turns, self._tokens)).astype(np.int32)
        before = np.array([stats.prompt_tokens, stats.response_tokens])
        asked: dict[tuple[int, int], Request] = {}
        began = time.process_time()
        for ticket, ids in enumerate(self._prompts):
            request = Request(ticket, (), ids, settings, seed=seed, may_go_on=keeps)
            for sample in range(SAMPLES):
                asked[ticket, sample] = replace(request, sample_ids=(sample,))
            self._engine.submit(replace(request, sample_ids=tuple(range(SAMPLES))))
        while completions := self._engine.completed():
            for done in completions:
                if done.turn + 1 == self._turns:
                    continue
                last = asked[done.ticket, done.sample]
                longer = np.concatenate([last.token_ids, done.token_ids, replies[done.turn]])
                following = replace(last, token_ids=longer, turn=done.turn + 1)
                asked[done.ticket, done.sample] = following
                self._engine.submit(following)
        seconds = time.process_time() - began
        computed = np.array([stats.prompt_tokens, stats.response_tokens]) - before
        return {
            "seconds": round(seconds, 3),
            "prompt_tokens": int(computed[0]),
            "sampled_tokens": int(computed[1]),
        }


def main() -> None:
    """Measures, prints, and writes what was measured."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n", 1)[0])
    parser.add_argument("--data", type=Path, required=True, help="folder of the two files")
    parser.add_argument("--rounds", type=int, default=5, help="rounds that count, of each kind")
    parser.add_argument("--turns", type=int, default=8, help="of an episode")
    parser.add_argument("--tokens", type=int, default=32, help="of a turn and of a reply, at most")
    parser.add_argument("--type", choices=TYPES, help="of the model; left out: Qwen3's layers")
    parser.add_argument("--to", type=Path, help="JSON file for the result")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        episodes = Episodes(Path(folder), options.data, options.turns, options.tokens, options.type)
        rounds = [
            {
                "kept": episodes.play(seed, keeps=True),
                "computed again": episodes.play(seed, keeps=False),
            }
            for seed in range(options.rounds + 1)
        ][1:]
    ratios = [each["computed again"]["seconds"] / each["kept"]["seconds"] for each in rounds]
    result: dict[str, Any] = {
        "command": " ".join(["python", "-m", "benchmarks.turns", *sys.argv[1:]]),
        "machine": machine(),
        "rounds": rounds,
        "ratio": {
            "median": round(statistics.median(ratios), 2),
            "min": round(min(ratios), 2),
            "max": round(max(ratios), 2),
        },
    }
    write_result(result, options.to)


if __name__ == "__main__":
    main()
