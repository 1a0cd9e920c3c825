"""transformers' generate as its users call it: padded batches that run till their longest row ends.

A row that has its tokens goes on as padding until the batch ends: only wanted tokens are counted.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, GenerationConfig, StoppingCriteria

from benchmarks.speed.side import Options, Round, read_work


class Lengths(StoppingCriteria):
    """Ends each row at its own length."""

    def __init__(self, width: int, lengths: torch.Tensor) -> None:
        self._ends = width + lengths

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return input_ids.shape[1] >= self._ends


def prepare(folder: Path, options: Options) -> Round:
    """All samples in batches of extra["batch"] rows, all of them together where it is not given."""
    torch.set_num_threads(options.threads)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    lm: Any = AutoModelForCausalLM.from_pretrained(
        folder / "model", dtype=getattr(torch, options.precision), attn_implementation="sdpa"
    )
    lm = lm.to(device).eval()
    work = read_work(folder)
    rows = [p for p in work["prompts"] for _ in range(work["samples"])]
    wanted = [n for lengths in work["lengths"] for n in lengths]
    size = options.extra.get("batch", len(rows))
    batches = [
        padded(rows[at : at + size], wanted[at : at + size], device)
        for at in range(0, len(rows), size)
    ]
    # The end token is no token of this model: nothing but its length ends a row.
    lm.generation_config = GenerationConfig(
        max_new_tokens=work["new_tokens"], do_sample=True, top_k=0, pad_token_id=0, eos_token_id=-1
    )

    @torch.no_grad()
    def one_round() -> Mapping[str, int]:
        sampled = 0
        for ids, mask, lengths in batches:
            width = ids.shape[1]
            out = lm.generate(
                input_ids=ids, attention_mask=mask, stopping_criteria=[Lengths(width, lengths)]
            )
            assert out.shape[1] == width + int(lengths.max())
            sampled += int(lengths.sum())
        return {"samples": len(rows), "sampled_tokens": sampled}

    return one_round


def padded(
    rows: list[list[int]], lengths: list[int], device: str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Token ids and mask [B, T] with padding on the left, and lengths [B]."""
    width = max(len(row) for row in rows)
    ids = torch.tensor([[0] * (width - len(row)) + row for row in rows], device=device)
    mask = torch.tensor([[0] * (width - len(r)) + [1] * len(r) for r in rows], device=device)
    return ids, mask, torch.tensor(lengths, device=device)
