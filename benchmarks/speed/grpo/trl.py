"""GRPO by TRL's trainer."""

from collections import Counter
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

from benchmarks.speed import trl_rounds
from benchmarks.speed.grpo.task import endless, points, prompts, questions, sizes
from benchmarks.speed.side import Options, Round

MICRO_BATCH = 8  # samples; on a CPU more of them take longer


class Counting(GRPOTrainer):
    """Counts what its loss reads."""

    counts: Counter[str]

    def compute_loss(self, model: Any, inputs: Any, *rest: Any, **more: Any) -> Any:
        self.counts["trained_tokens"] += int(inputs["completion_mask"].sum())
        return super().compute_loss(model, inputs, *rest, **more)


def prepare(folder: Path, options: Options) -> Round:
    """See Side."""
    samples, new_tokens = sizes(folder)
    model = endless(folder)
    rows = questions(folder, options)

    def make(counts: Counter[str]) -> GRPOTrainer:
        def reward(
            completions: Any, completion_ids: Any, equal: list[bool], **_: Any
        ) -> list[float]:
            counts["samples"] += len(completions)
            counts["sampled_tokens"] += sum(map(len, completion_ids))
            texts = (completion[0]["content"] for completion in completions)
            rewards = [points(text, same) for text, same in zip(texts, equal, strict=True)]
            groups = (rewards[first : first + samples] for first in range(0, len(rewards), samples))
            counts["groups_without_gradient"] += sum(len(set(group)) == 1 for group in groups)
            return rewards

        trainer = Counting(
            model=AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32),
            reward_funcs=reward,
            args=config(folder, options, samples, new_tokens),
            train_dataset=Dataset.from_list([as_chat(row) for row in rows]),
            processing_class=AutoTokenizer.from_pretrained(model),
        )
        trainer.counts = counts
        return trainer

    return trl_rounds.rounds(options, make)


def as_chat(row: dict[str, Any]) -> dict[str, Any]:
    """A question as TRL takes it."""
    return {"prompt": [{"role": "user", "content": row["question"]}], "equal": row["equal"]}


def config(folder: Path, options: Options, samples: int, new_tokens: int) -> GRPOConfig:
    """Exactly on-policy, one update a generation, without a reference: as postgrad's recipe."""
    micro_batch = options.extra.get("micro_batch", MICRO_BATCH)
    update = prompts(options) * samples
    return GRPOConfig(
        **trl_rounds.common(folder, options, update=update, micro_batch=micro_batch),
        num_generations=samples,
        max_completion_length=new_tokens,
        shuffle_dataset=False,
        loss_type="grpo",
        epsilon=0.2,
        beta=0.0,
    )
