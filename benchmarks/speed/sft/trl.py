"""SFT by TRL's trainer, packed and not; the faster of the two counts.

Packed, an update has the rows of an update: they are packed for themselves, as TRL packs a whole
dataset, so that both ways train on the same tokens.
"""

from collections import Counter
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import SFTConfig, SFTTrainer, pack_dataset

from benchmarks.speed import trl_rounds
from benchmarks.speed.rounds import Fastest
from benchmarks.speed.sft.task import UPDATE
from benchmarks.speed.side import Options, Round
from benchmarks.speed.tokens import read_tokens

MICRO_BATCH = 2  # conversations; on a CPU more of them take longer
PACK = 1024  # tokens; one pack is a forward
Rows = list[dict[str, Any]]


class Counting(SFTTrainer):
    """Counts what its loss reads."""

    counts: Counter[str]

    def compute_loss(self, model: Any, inputs: Any, *rest: Any, **more: Any) -> Any:
        self.counts["trained_tokens"] += int((inputs["labels"] != -100).sum())
        starts = inputs["position_ids"] == 0 if "position_ids" in inputs else inputs["input_ids"]
        self.counts["rows"] += int(starts.sum()) if starts.dtype == torch.bool else len(starts)
        return super().compute_loss(model, inputs, *rest, **more)


def prepare(folder: Path, options: Options) -> Round:
    """See Side."""
    rows = [labelled(ids, mask) for ids, mask in read_tokens(folder, "conversations")]
    updates = [rows[first : first + UPDATE] for first in range(0, len(rows) - UPDATE + 1, UPDATE)]
    packs = packed(updates)
    sizes = {"unpacked": options.extra.get("micro_batch", MICRO_BATCH), "packed": 1}
    ways = {
        "unpacked": ([row for update in updates for row in update], UPDATE),
        "packed": ([pack for update in packs for pack in update], len(packs[0])),
    }
    wanted = options.extra.get("packing", list(ways))
    return Fastest(
        {
            name: partial(one_way, folder, options, *ways[name], micro_batch=sizes[name])
            for name in wanted
        }
    )


def labelled(ids: list[int], mask: list[bool]) -> dict[str, Any]:
    """A conversation as TRL's collator takes it."""
    kept = zip(ids, mask, strict=True)
    return {"input_ids": ids, "labels": [token if bears else -100 for token, bears in kept]}


def packed(updates: Iterable[Rows]) -> list[Rows]:
    """The packs of every update, best fit first; each update has as many as the one with most, the
    others' longest are divided.
    """
    packs_by_update = [
        pack_dataset(Dataset.from_list(rows), PACK, "bfd").to_list()  # pyright: ignore[reportCallIssue]
        for rows in updates
    ]
    most = max(map(len, packs_by_update))
    for packs in packs_by_update:
        while len(packs) < most:
            longest = max(packs, key=lambda pack: len(pack["seq_lengths"]))
            packs.remove(longest)
            packs += divided(longest)
    return packs_by_update


def divided(pack: dict[str, Any]) -> Rows:
    """Two packs of one, cut between two conversations."""
    lengths = pack["seq_lengths"]
    half = len(lengths) // 2
    cut = sum(lengths[:half])
    first = {name: pack[name][:cut] for name in ("input_ids", "labels")}
    second = {name: pack[name][cut:] for name in ("input_ids", "labels")}
    return [first | {"seq_lengths": lengths[:half]}, second | {"seq_lengths": lengths[half:]}]


def one_way(folder: Path, options: Options, rows: Rows, update: int, *, micro_batch: int) -> Round:
    """The rounds of one trainer."""

    def make(counts: Counter[str]) -> SFTTrainer:
        model = folder / "model"
        is_packed = "seq_lengths" in rows[0]
        trainer = Counting(
            model=AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32),
            args=SFTConfig(
                **trl_rounds.common(folder, options, update=update, micro_batch=micro_batch),
                max_length=PACK,
                packing=is_packed,
                dataset_kwargs={"skip_prepare_dataset": True},
                train_sampling_strategy="sequential",
            ),
            train_dataset=Dataset.from_list(rows),
            processing_class=AutoTokenizer.from_pretrained(model),
        )
        trainer.counts = counts
        return trainer

    return trl_rounds.rounds(options, make)
