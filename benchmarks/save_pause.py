"""How long training stands still for a checkpoint: this system against a save that stops the run.

    python benchmarks/save_pause.py --hidden 512 --layers 8 --steps 8 --to save_pause.json

A real SFT run saves every second step; its events say how long each save stopped it and how long
writing took behind it. Beside it, in the same process and over the same tensors: one copy in
memory, and `torch.save` of weights and optimizer state with an fsync, which is what a trainer that
saves in its loop waits for. Medians; a step is one without a save.
"""

import argparse
import json
import os
import shlex
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from postgrad.checkpoint.settings import CheckpointSettings
from postgrad.checkpoint.store import CheckpointStore
from postgrad.models.stored import real
from postgrad.observe.console import Console
from postgrad.recipe.load import load_recipe
from postgrad.training.start import train

RECIPE = """
job = "sft"
run_dir = "{run_dir}"
steps = {steps}
[model.init]
type = "qwen3"
hidden_size = {hidden}
intermediate_size = {intermediate}
num_hidden_layers = {layers}
num_attention_heads = 8
num_key_value_heads = 8
[model.init.tokenizer]
kind = "bpe"
vocab_size = 8192
[data]
path = "reasoning-gym:gsm_symbolic"
size = 2000
max_len = 1024
[batch]
train_batch_size = {batch}
[learner]
lr = 1e-5
threads = {threads}
[checkpoint]
save_steps = 2
max_ckpt_num = 2
"""


def lines(path: Path) -> list[dict[str, Any]]:
    """The objects of a JSON-lines file."""
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


def timed(call: Callable[[], object], rounds: int) -> float:
    """Median seconds."""
    seconds: list[float] = []
    for _ in range(rounds):
        began = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds)


def stopping(tensors: dict[str, Any], folder: Path) -> None:
    """What a trainer waits for that saves in its loop."""
    path = folder / "state.pt"
    with path.open("wb") as file:
        torch.save(tensors, file)
        file.flush()
        os.fsync(file.fileno())
    path.unlink()


def measure(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Runs, then looks at the run's own records."""
    recipe = folder / "recipe.toml"
    shape = {name: getattr(options, name) for name in ("hidden", "layers", "steps", "batch")}
    text = RECIPE.format(
        run_dir=folder / "run",
        intermediate=3 * options.hidden,
        threads=options.threads,
        **shape,
    )
    recipe.write_text(text, "utf-8")
    train(load_recipe(recipe), Console("plain"))
    events = [
        event for event in lines(folder / "run" / "events.jsonl") if event["event"] == "saved"
    ]
    behind = [event for event in events if event["behind"]]
    steps = [line["train_seconds"] for line in lines(folder / "run" / "metrics.jsonl")]
    store = CheckpointStore(folder / "run" / "checkpoints", CheckpointSettings())
    newest = store.load()
    stems = ("policy.weights", "policy.optimizer")
    tensors: dict[str, dict[str, torch.Tensor]] = {
        stem: {name: real(tensor) for name, tensor in newest.tensors(stem).items()}
        for stem in stems
    }
    copy = timed(lambda: [t.clone() for named in tensors.values() for t in named.values()], 5)
    pause = statistics.median(save["pause_seconds"] for save in behind)
    step = statistics.median(steps[0::2])  # the steps behind which no save is written
    return {
        "checkpoint_bytes": events[0]["size_bytes"],
        "step_seconds": step,
        "step_beside_a_save_seconds": statistics.median(steps[2::2]),
        "pause_seconds": pause,
        "pause_per_step": pause / step,
        "one_copy_seconds": copy,
        "write_seconds_behind": statistics.median(save["write_seconds"] for save in behind),
        "torch_save_seconds": timed(lambda: stopping(tensors, folder), 3),
    }


def main() -> None:
    """Prints and writes the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--to", type=Path)
    options = parser.parse_args()
    report: dict[str, Any] = {"command": shlex.join([Path(sys.executable).name, *sys.argv])}
    with tempfile.TemporaryDirectory() as folder:
        report |= measure(options, Path(folder))
    text = json.dumps(report, indent=2)
    print(text)
    if options.to:
        options.to.write_text(text + "\n", "utf-8")


if __name__ == "__main__":
    main()
