"""What a grammar adds to each sampled token of the built-in engine.

    python -m benchmarks.grammar --data DIR --to benchmarks/results/grammar.json

The model of `python -m benchmarks.speed` (6M parameters, fresh, 4 096 tokens) samples 32 answers of
96 tokens each, on one thread in float32. Rounds without a grammar and with each of GRAMMARS take
turns, after one of each that does not count. Ratios are of CPU seconds of the same turn. DIR has
gsm8k.jsonl and hh-rlhf-harmless.jsonl.gz, of which the tokenizer is made.
"""

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.speed.report import machine
from benchmarks.speed.rollout.postgrad import Lengths
from benchmarks.speed.workload import (
    SHAPES,
    VOCABULARY,
    make_model,
    make_tokenizer,
    prompt_ids,
    rows,
)
from postgrad.rollout.engine import Request, generate
from postgrad.rollout.local.engine import LocalEngine
from postgrad.rollout.settings import SamplingSettings

PROMPTS, SAMPLES, TOKENS = 4, 8, 96
SCHEMA = {
    "type": "object",
    "properties": {"reason": {"type": "string"}, "answer": {"type": "integer"}},
    "required": ["reason", "answer"],
}
GRAMMARS: dict[str, dict[str, Any]] = {
    "none": {},
    "regex (?s:.*)": {"regex": "(?s:.*)"},
    "regex ([a-z]+ ){200}#### [0-9]+": {"regex": "([a-z]+ ){200}#### [0-9]+"},
    "json_schema of two properties": {"json_schema": json.dumps(SCHEMA)},
}


class Sampling:
    """The engine and its prompts."""

    def __init__(self, data: Path) -> None:
        questions = list(rows(data / "gsm8k.jsonl"))
        tokenizer = make_tokenizer(questions, list(rows(data / "hh-rlhf-harmless.jsonl.gz")))
        model = make_model(SHAPES["6m"], VOCABULARY, tokenizer).eval()
        asked = [prompt_ids(tokenizer, row["question"]) for row in questions[:PROMPTS]]
        self._prompts = [np.array(ids, np.int32) for ids in asked]
        slots = PROMPTS * SAMPLES
        room = slots * TOKENS + sum(map(len, asked))
        self._engine = LocalEngine(model, tokenizer, slots=slots, cache_tokens=2 * room)
        stopper: Any = Lengths(np.full((PROMPTS, SAMPLES), TOKENS))
        self._engine._stopper = stopper  # pyright: ignore[reportPrivateUsage]

    def microseconds(self, grammar: dict[str, Any], seed: int) -> float:
        """CPU time of all answers, per sampled token."""
        settings = SamplingSettings(max_new_tokens=TOKENS, **grammar)
        requests = [
            Request(ticket, tuple(range(SAMPLES)), ids, settings, seed=seed)
            for ticket, ids in enumerate(self._prompts)
        ]
        began = time.process_time()
        answers = generate(self._engine, requests)
        seconds = time.process_time() - began
        tokens = sum(len(answer.token_ids) for answer in answers)
        if tokens < PROMPTS * SAMPLES * TOKENS:
            sys.exit(f"{grammar}: {tokens} tokens, fewer than {PROMPTS * SAMPLES * TOKENS}")
        return 1e6 * seconds / tokens


def main() -> None:
    """Measures, prints, and writes what was measured."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--data", type=Path, required=True, help="folder of the two files")
    parser.add_argument("--rounds", type=int, default=5, help="rounds that count, of each kind")
    parser.add_argument("--to", type=Path, help="JSON file for the result")
    options = parser.parse_args()
    torch.set_num_threads(1)
    sampling = Sampling(options.data)
    turns = [
        {name: sampling.microseconds(grammar, seed) for name, grammar in GRAMMARS.items()}
        for seed in range(options.rounds + 1)
    ][1:]
    result: dict[str, Any] = {
        "command": f"python -m benchmarks.grammar --data DIR --rounds {options.rounds}",
        "machine": machine(),
        "grammars": {
            name: {
                "microseconds_per_token": [round(turn[name], 1) for turn in turns],
                "median": round(statistics.median(turn[name] for turn in turns), 1),
                "ratio": round(statistics.median(turn[name] / turn["none"] for turn in turns), 3),
            }
            for name in GRAMMARS
        },
    }
    text = json.dumps(result, indent=1)
    print(text)
    if options.to:
        options.to.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
