"""How a step grows: time with tokens and squared lengths, memory with the batch.

    python -m benchmarks.growth --rounds 3 --threads 1 --to growth.json

A step's two parts on a fresh 6M-parameter Qwen2 in float32: "rollout", where the built-in engine
with 16 slots samples n responses of length L, and "update", where the learner with a token budget
learns from n sequences of length L. n grows from 1x to 16x, then L does. Both are CPU seconds, and
are fitted by a · tokens + b · Σ length² (least squares of relative errors, a and b not negative):
the first term is every product with a weight, the second attention. Shown are measured and fitted
seconds, and the largest relative error. memory: the peak of an update of that batch, above what the
process held before it.
"""

import argparse
import json
import shlex
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from transformers import AutoModelForCausalLM, Qwen2Config

from benchmarks.speed.report import machine
from benchmarks.speed.worker import cpu_seconds, forget_peak, peak_bytes
from benchmarks.speed.workload import SHAPES, VOCABULARY
from postgrad.algorithms.grpo import GRPO
from postgrad.core.ragged import Ragged
from postgrad.core.records import Experience, Sequences
from postgrad.learner.backbone import Backbone, MicroBatch
from postgrad.learner.policy import PolicyLearner
from postgrad.learner.settings import LearnerSettings
from postgrad.learner.update import Update
from postgrad.models.attention import ATTENTION_NAME
from postgrad.models.linear import fuse_norms, speed_up
from postgrad.rollout.engine import Request, generate
from postgrad.rollout.local.engine import LocalEngine
from postgrad.rollout.settings import SamplingSettings

SCALES = (1, 2, 4, 8, 16)
SLOTS, PROMPT = 16, 16
BASES = {"rollout": (16, 32), "update": (4, 128)}  # sequences, and the length of each

Work = Callable[[int, int], None]  # of a number of sequences and their length


@dataclass(frozen=True, slots=True)
class Point:
    """One size of a part of a step. seconds: CPU seconds, a round each."""

    sequences: int
    length: int
    seconds: list[float]
    peaks: list[int]

    @property
    def tokens(self) -> int:
        """All of them."""
        return self.sequences * self.length

    @property
    def squares(self) -> int:
        """The sum of squared lengths."""
        return self.sequences * self.length**2


class NoText:
    """A tokenizer that ends nothing and decodes nothing."""

    eos_token_id = -1

    def batch_decode(self, rows: list[Any], skip_special_tokens: bool) -> list[str]:
        """One empty text a row."""
        return [""] * len(rows)


def fresh() -> Any:
    """The same weights every time, with the layers that runs have."""
    torch.manual_seed(0)
    config = Qwen2Config(vocab_size=VOCABULARY, tie_word_embeddings=True, **SHAPES["6m"])
    model = AutoModelForCausalLM.from_config(config, attn_implementation=ATTENTION_NAME)
    speed_up(model, torch.device("cpu"))
    fuse_norms(model, torch.device("cpu"))
    return model


def rollout() -> Work:
    """Sampling `sequences` responses to short prompts of their own."""
    lm = fresh()
    lm.generation_config.eos_token_id = None
    longest = PROMPT + BASES["rollout"][1] * SCALES[-1]
    engine = LocalEngine(lm, NoText(), slots=SLOTS, cache_tokens=SLOTS * 2 * longest)
    prompt = np.arange(3, 3 + PROMPT, dtype=np.int32)

    def work(sequences: int, length: int) -> None:
        sampling = SamplingSettings(max_new_tokens=length)
        done = generate(engine, [Request(i, (0,), prompt, sampling) for i in range(sequences)])
        assert sum(len(completion.token_ids) for completion in done) == sequences * length

    return work


def update(budget: int) -> Work:
    """One optimizer step on `sequences` unrelated ones; the second half of each bears loss."""
    backbone = Backbone(fresh(), torch.device("cpu"), MicroBatch(max_tokens=budget))
    learner = PolicyLearner(backbone, LearnerSettings(lr=1e-6, max_grad_norm=0.0), 100)

    def work(sequences: int, length: int) -> None:
        rng = np.random.default_rng(0)
        tokens = list(rng.integers(3, VOCABULARY, (sequences, length)))
        mask = np.arange(length) >= length // 2
        columns = Sequences(
            Ragged.of(tokens, np.int32),
            Ragged.of([mask] * sequences, np.bool_),
            np.arange(sequences),
        )
        advantages = Ragged.of(
            [mask * np.float32(rng.normal()) for _ in range(sequences)], np.float32
        )
        experience = Experience(columns, {"advantages": advantages}, np.ones(sequences, np.bool_))
        learner.update(Update(experience, np.arange(sequences)), GRPO()).result()

    return work


def grown(base: tuple[int, int]) -> list[Point]:
    """1x to 16x of the batch, then 2x to 16x of the length."""
    sequences, length = base
    sizes = [(sequences * scale, length) for scale in SCALES]
    sizes += [(sequences, length * scale) for scale in SCALES[1:]]
    return [Point(*size, [], []) for size in sizes]


def measure(work: Work, points: Sequence[Point], rounds: int) -> None:
    """Every point in every round, after the smallest and the longest to warm up."""
    for point in (points[0], points[-1]):
        work(point.sequences, point.length)
    for _ in range(rounds):
        for point in points:
            held = psutil.Process().memory_info().rss
            forget_peak()
            before = cpu_seconds()
            work(point.sequences, point.length)
            point.seconds.append(cpu_seconds() - before)
            point.peaks.append(peak_bytes() - held)


def fit(tokens: Sequence[int], squares: Sequence[int], seconds: Sequence[float]) -> Any:
    """[2] a and b of seconds = a · tokens + b · squares, by least squares of relative errors."""
    terms = np.stack([tokens, squares], 1) / np.array(seconds)[:, None]
    unit_vector = np.ones(len(seconds))
    both = np.linalg.lstsq(terms, unit_vector, rcond=None)[0]
    if (both >= 0).all():
        return both
    alone = (terms.T @ unit_vector) / (terms**2).sum(0)  # of one term without the other
    errors = ((terms * alone - 1) ** 2).sum(0)
    return np.where(np.arange(2) == errors.argmin(), alone, 0.0)


def fitted(points: Sequence[Point]) -> dict[str, Any]:
    """The fit, and how far each point is from it."""
    seconds = [statistics.median(point.seconds) for point in points]
    a, b = fit([p.tokens for p in points], [p.squares for p in points], seconds)
    rows = [
        {
            "sequences": point.sequences,
            "length": point.length,
            "cpu_seconds": second,
            "fit_seconds": float(a * point.tokens + b * point.squares),
            "peak_mib": round(statistics.median(point.peaks) / 2**20, 1),
        }
        for point, second in zip(points, seconds, strict=True)
    ]
    return {
        "a_microseconds_per_token": 1e6 * float(a),
        "b_nanoseconds_per_squared_length": 1e9 * float(b),
        "largest_relative_error": max(abs(r["fit_seconds"] / r["cpu_seconds"] - 1) for r in rows),
        "points": rows,
    }


def main() -> None:
    """Measure, print a table, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--budget", type=int, default=2048, help="tokens of one forward")
    parser.add_argument("--parts", nargs="+", choices=BASES, default=list(BASES))
    parser.add_argument("--to", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    makers = {"rollout": rollout, "update": lambda: update(args.budget)}
    result: dict[str, Any] = {
        "command": shlex.join(["python", "-m", "benchmarks.growth", *sys.argv[1:]]),
        "machine": machine(),
        "torch": torch.__version__,
        "budget": args.budget,
    }
    for part in args.parts:
        points = grown(BASES[part])
        measure(makers[part](), points, args.rounds)
        result[part] = fit_of_part = fitted(points)
        print(
            f"{part}: {fit_of_part['a_microseconds_per_token']:.1f} µs a token, "
            f"{fit_of_part['b_nanoseconds_per_squared_length']:.1f} ns a squared length, "
            f"within {fit_of_part['largest_relative_error']:.0%}"
        )
        for row in fit_of_part["points"]:
            print(
                f"{row['sequences']:6} x {row['length']:<6}{row['cpu_seconds']:8.2f} s, "
                f"fit {row['fit_seconds']:.2f} s{row['peak_mib']:10.0f} MiB"
            )
    if args.to:
        args.to.write_text(json.dumps(result, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
