"""What a grammar adds to each sampled token of the built-in engine.

    python -m benchmarks.grammar --data DIR --to benchmarks/results/grammar.json

The model of `python -m benchmarks.speed` (6M parameters, fresh, 4 096 tokens) samples 32 answers of
at most 96 tokens (--samples, --tokens), on one thread in float32. Rounds without a grammar and with
each of GRAMMARS take turns, after one of each that does not count. Ratios are of CPU seconds of the
same turn. DIR has gsm8k.jsonl and hh-rlhf-harmless.jsonl.gz, of which the tokenizer is made.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.speed.report import machine, write_result
from benchmarks.speed.side import read_work
from benchmarks.speed.workload import VOCABULARY, make
from postgrad.models.load import load_model
from postgrad.rollout.engine import Request, generate
from postgrad.rollout.local.engine import LocalEngine
from postgrad.rollout.settings import SamplingSettings

PROMPTS = 4
LEAST = 0.9  # of all tokens that could be sampled
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

    def __init__(self, folder: Path, data: Path, samples: int, tokens: int) -> None:
        self._samples, self._tokens = samples, tokens  # of a prompt, of an answer
        make(folder, data, "6m", VOCABULARY, prompts=PROMPTS)
        model = load_model(str(folder / "model"), dtype=torch.float32)
        self._prompts = [np.array(ids, np.int32) for ids in read_work(folder)["prompts"]]
        slots = PROMPTS * samples
        room = slots * tokens + sum(map(len, self._prompts))
        self._engine = LocalEngine(model.lm, model.tokenizer, slots=slots, cache_tokens=2 * room)

    def microseconds(self, grammar: dict[str, Any], seed: int) -> float:
        """CPU time of all answers, per sampled token."""
        settings = SamplingSettings(max_new_tokens=self._tokens, **grammar)
        requests = [
            Request(ticket, tuple(range(self._samples)), ids, settings, seed=seed)
            for ticket, ids in enumerate(self._prompts)
        ]
        began = time.process_time()
        answers = generate(self._engine, requests)
        seconds = time.process_time() - began
        tokens = sum(len(answer.token_ids) for answer in answers)
        if tokens < LEAST * PROMPTS * self._samples * self._tokens:  # few rows make a token dearer
            sys.exit(f"{grammar}: answers ended after {tokens} tokens in all, too few to compare")
        return 1e6 * seconds / tokens


def main() -> None:
    """Measures, prints, and writes what was measured."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--data", type=Path, required=True, help="folder of the two files")
    parser.add_argument("--rounds", type=int, default=5, help="rounds that count, of each kind")
    parser.add_argument("--samples", type=int, default=8, help="answers of each of 4 prompts")
    parser.add_argument("--tokens", type=int, default=96, help="of an answer, at most")
    parser.add_argument("--to", type=Path, help="JSON file for the result")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        sampling = Sampling(Path(folder), options.data, options.samples, options.tokens)
        turns = [
            {name: sampling.microseconds(grammar, seed) for name, grammar in GRAMMARS.items()}
            for seed in range(options.rounds + 1)
        ][1:]
    result: dict[str, Any] = {
        "command": " ".join(["python", "-m", "benchmarks.grammar", *sys.argv[1:]]),
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
    write_result(result, options.to)


if __name__ == "__main__":
    main()
