"""The built-in rollout engine, sized as a run would size it: one request a prompt, n samples of it.

A run's samples end at an end token, each at its own length; here they end at the lengths of the
work, by a stopper in the place of the engine's own.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.speed.side import Options, Round, read_work
from postgrad.fleet.engines import probe_sizes
from postgrad.models.load import load_model
from postgrad.rollout.engine import Request, generate
from postgrad.rollout.local.engine import LocalEngine
from postgrad.rollout.settings import RolloutSettings, SamplingSettings


class Lengths:
    """Ends sample s of ticket t after lengths[t, s] tokens."""

    def __init__(self, lengths: NDArray[np.int64]) -> None:
        self._lengths = lengths

    def stopped(self, rows: Any) -> NDArray[np.bool_]:
        """[count] rows that have their tokens."""
        n = rows.count
        return rows.written[:n] >= self._lengths[rows.ticket[:n], rows.sample[:n]]


def prepare(folder: Path, options: Options) -> Round:
    """All samples of all prompts; extra["slots"] overrides the engine's own choice."""
    torch.set_num_threads(options.threads)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = load_model(
        str(folder / "model"), dtype=getattr(torch, options.precision), device=device
    )
    work = read_work(folder)
    prompts = [np.array(ids, np.int32) for ids in work["prompts"]]
    samples, limit = tuple(range(work["samples"])), work["new_tokens"]
    sizes = probe_sizes(
        model.lm,
        RolloutSettings(slots=options.extra.get("slots")),
        sequences=len(prompts) * len(samples),
        max_len=max(map(len, prompts)) + limit,
    )
    engine = LocalEngine(
        model.lm, model.tokenizer, slots=sizes.slots, cache_tokens=sizes.cache_tokens
    )
    engine._stopper = Lengths(np.array(work["lengths"]))  # pyright: ignore[reportAttributeAccessIssue, reportPrivateUsage]
    sampling = SamplingSettings(max_new_tokens=limit)
    rounds = 0

    def one_round() -> Mapping[str, int]:
        nonlocal rounds
        rounds += 1
        requests = [
            Request(t, samples, ids, sampling, seed=rounds) for t, ids in enumerate(prompts)
        ]
        done = generate(engine, requests)
        return {"samples": len(done), "sampled_tokens": sum(len(c.token_ids) for c in done)}

    return one_round
