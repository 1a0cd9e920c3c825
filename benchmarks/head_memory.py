"""Peak memory of logprobs with gradients: the chunked output head against whole logits.

    python benchmarks/head_memory.py --entries 2048 --vocabulary 151936 --to head_memory.json

Each side runs in a process of its own, forward and backward in float32 over the same hidden states
[entries, 256]; reported is how far the process's peak rose above what it held before.
"""

import argparse
import json
import resource
import shlex
import subprocess
import sys
from pathlib import Path

import torch
from torch import nn
from transformers import PretrainedConfig

from postgrad.models.head import target_logprobs

HIDDEN = 256
SIDES = ("chunked", "whole")


class Head(nn.Module):
    """A model that is nothing but its output head."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.config = PretrainedConfig(vocab_size=vocabulary)
        self.head = nn.Linear(HIDDEN, vocabulary, bias=False)

    def get_output_embeddings(self) -> nn.Linear:
        """What transformers' models have."""
        return self.head


def peak() -> int:
    """Bytes that this process held at most so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def measure(side: str, entries: int, vocabulary: int) -> None:
    """Prints the bytes and the mean logprob of one side, as JSON."""
    torch.manual_seed(0)
    lm = Head(vocabulary)
    lm.head.weight.grad = torch.zeros_like(lm.head.weight)  # both sides need it
    hidden = torch.randn(entries, HIDDEN, requires_grad=True)
    targets = torch.randint(0, vocabulary, (entries,))
    before = peak()
    if side == "chunked":
        logprobs, _ = target_logprobs(lm, hidden, targets)
    else:
        logprobs = torch.log_softmax(lm.head(hidden), -1).gather(-1, targets[:, None])[:, 0]
    logprobs.mean().backward()
    print(json.dumps({"bytes": peak() - before, "mean_logprob": float(logprobs.mean())}))


def main() -> None:
    """Measures both sides, or the one that is named."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--entries", type=int, default=2048)
    parser.add_argument("--vocabulary", type=int, default=151_936)
    parser.add_argument("--side", choices=SIDES)
    parser.add_argument("--to", type=Path)
    options = parser.parse_args()
    if options.side:
        measure(options.side, options.entries, options.vocabulary)
        return
    shape = ["--entries", str(options.entries), "--vocabulary", str(options.vocabulary)]
    report: dict[str, object] = {"command": shlex.join([Path(sys.executable).name, *sys.argv])}
    for side in SIDES:
        command = [sys.executable, __file__, *shape, "--side", side]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        report[side] = json.loads(done.stdout)
    text = json.dumps(report, indent=2)
    print(text)
    if options.to:
        options.to.write_text(text + "\n", "utf-8")


if __name__ == "__main__":
    main()
