"""What a rank holds, stage by stage: measured, beside what docs/distributed.md says.

    python -m benchmarks.ranks_memory --ranks 2

Each line is a group of fresh processes over gloo that train a Qwen3 of about 29M parameters (fewer
with --layers, --hidden and --vocabulary) in float32 for three updates of four micro-batches of 64
tokens. "update" is the most that rank 0 held during the last update, "between" what it holds after
it, both above what the process held before it had a model, in bytes for each parameter. The C
library's allocator gives freed memory back at once (MALLOC_MMAP_THRESHOLD_). --only LINE measures
lines of these names.
"""

import argparse
import json
import multiprocessing
import os
import shlex
import socket
import sys
import tempfile
from pathlib import Path
from typing import Any

THRESHOLD = "65536"
SETTINGS: list[dict[str, Any]] = [
    {"stage": "none"},
    {"stage": "zero1"},
    {"stage": "zero2"},
    {"stage": "zero3"},
    {"stage": "none", "tensor": 2},
    {"stage": "zero3", "tensor": 2},
    {"stage": "zero3", "offload": True},
]


def main() -> None:
    """Prints the table, and writes its figures to the file that was asked for."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--only", nargs="+", metavar="LINE", help='for example "stage zero3"')
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=512, help="a multiple of 16")
    parser.add_argument("--vocabulary", type=int, default=8192)
    parser.add_argument("--to", type=Path, help="JSON file for the result")
    options = parser.parse_args()
    ranks, size = options.ranks, (options.layers, options.hidden, options.vocabulary)
    lines: dict[str, dict[str, float]] = {}
    os.environ["MALLOC_MMAP_THRESHOLD_"] = os.environ["MALLOC_TRIM_THRESHOLD_"] = THRESHOLD
    os.environ["OMP_NUM_THREADS"] = "1"
    print(f"| {ranks} ranks | during an update | between updates |\n|---|---|---|")
    for settings in SETTINGS:
        named = ", ".join(f"{key} {value}" for key, value in settings.items())
        if options.only and named not in options.only:
            continue
        update, between = _measured(ranks, settings, size)
        print(f"| {named} | {update:.1f} | {between:.1f} |", flush=True)
        lines[named] = {"update": round(update, 2), "between": round(between, 2)}
    if options.to:
        command = shlex.join(["python", "-m", "benchmarks.ranks_memory", *sys.argv[1:]])
        report = {"command": command, "bytes_per_parameter": lines}
        options.to.write_text(json.dumps(report, indent=1) + "\n", "utf-8")


def _measured(
    ranks: int, settings: dict[str, Any], model: tuple[int, int, int]
) -> tuple[float, float]:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{held.getsockname()[1]}"
    spawn = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        answer_file = Path(folder) / "said.json"
        processes = [
            spawn.Process(target=_rank, args=(rank, ranks, address, settings, model, answer_file))
            for rank in range(ranks)
        ]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
        if any(process.exitcode for process in processes):
            sys.exit(f"a rank failed: {settings}")
        update, between = json.loads(answer_file.read_text())
        return update, between


def _rank(
    rank: int,
    size: int,
    address: str,
    settings: dict[str, Any],
    model: tuple[int, int, int],
    answer_file: Path,
) -> None:
    import numpy as np
    import torch
    from transformers import AutoModelForCausalLM, Qwen3Config

    from benchmarks.speed.worker import forget_peak, peak_bytes
    from postgrad.algorithms.sft import SFT
    from postgrad.core.ragged import Ragged
    from postgrad.core.records import Experience, Sequences
    from postgrad.learner.backbone import Backbone, MicroBatch
    from postgrad.learner.policy import PolicyLearner
    from postgrad.learner.settings import LearnerSettings
    from postgrad.learner.update import Update
    from postgrad.models.attention import ATTENTION_NAME
    from postgrad.parallel.ranks import Grid, Ranks

    torch.set_num_threads(1)
    ranks = Ranks.join(rank, size, address, grid=Grid(tensor=settings.get("tensor", 1)))
    layers, hidden, vocabulary = model
    config = Qwen3Config(
        vocab_size=vocabulary, hidden_size=hidden, intermediate_size=3 * hidden,
        head_dim=hidden // 8, num_hidden_layers=layers, num_attention_heads=8,
        num_key_value_heads=4,
        tie_word_embeddings=True,
    )  # fmt: skip
    ranks.gathered(rank)  # what a process group takes is not the model's
    forget_peak()
    before = peak_bytes()
    lm = AutoModelForCausalLM.from_config(config, attn_implementation=ATTENTION_NAME).eval()
    parameters = sum(parameter.numel() for parameter in lm.parameters())
    backbone = Backbone(lm, torch.device("cpu"), MicroBatch(max_tokens=64))
    backbone.divide(ranks, settings["stage"], offload=settings.get("offload", False))
    learner = PolicyLearner(backbone, LearnerSettings(), 100)
    length, count = 64, 4 * ranks.replicas
    tokens = np.random.default_rng(0).integers(0, vocabulary, (count, length))
    mask = np.arange(length) >= 1
    sequences = Sequences(
        Ragged.of(list(tokens), np.int32), Ragged.of([mask] * count, np.bool_), np.arange(count)
    )
    experience = Experience(sequences, {}, np.ones(count, np.bool_))
    for _ in range(3):
        forget_peak()
        learner.update(Update(experience, np.arange(count)), SFT()).result()
    update = peak_bytes() - before
    forget_peak()
    between = peak_bytes() - before
    if rank == 0:
        answer_file.write_text(json.dumps([update / parameters, between / parameters]))
    ranks.leave()


if __name__ == "__main__":
    main()
