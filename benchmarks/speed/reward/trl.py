"""A reward model by TRL's trainer."""

from collections import Counter
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForSequenceClassification, AutoTokenizer
from trl import RewardConfig, RewardTrainer

from benchmarks.speed import trl_rounds
from benchmarks.speed.reward.task import UPDATE, start
from benchmarks.speed.side import Options, Round
from benchmarks.speed.tokens import MAX_LEN, read_tokens

MICRO_BATCH = 2  # pairs; on a CPU more of them take longer


class Counting(RewardTrainer):
    """Counts what its loss reads."""

    counts: Counter[str]

    def compute_loss(self, model: Any, inputs: Any, *rest: Any, **more: Any) -> Any:
        self.counts["trained_tokens"] += int(inputs["attention_mask"].sum())
        self.counts["pairs"] += len(inputs["input_ids"]) // 2
        return super().compute_loss(model, inputs, *rest, **more)


def prepare(folder: Path, options: Options) -> Round:
    """See Side."""
    path = start(folder)
    pairs = read_tokens(folder, "pairs")
    rows = [{"chosen_ids": chosen, "rejected_ids": rejected} for chosen, rejected in pairs]
    rows = rows[: len(rows) // UPDATE * UPDATE]
    micro_batch = options.extra.get("micro_batch", MICRO_BATCH)

    def make(counts: Counter[str]) -> RewardTrainer:
        model = AutoModelForSequenceClassification.from_pretrained(path, dtype=torch.float32)
        trainer = Counting(
            model=model,
            args=RewardConfig(
                **trl_rounds.common(folder, options, update=UPDATE, micro_batch=micro_batch),
                max_length=MAX_LEN,
                train_sampling_strategy="sequential",
            ),
            train_dataset=Dataset.from_list(rows),
            processing_class=AutoTokenizer.from_pretrained(path),
        )
        trainer.counts = counts
        return trainer

    return trl_rounds.rounds(options, make)
