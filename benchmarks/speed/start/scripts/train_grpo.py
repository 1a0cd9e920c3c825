"""What a user of TRL writes: GSM8K, one reward function, GRPO. It tells of each step.

python train_grpo.py FOLDER PRECISION THREADS QUESTIONS SAMPLES NEW_TOKENS
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer


class Telling(TrainerCallback):
    """A line a step."""

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        print(f"\nstep {state.global_step}", flush=True)  # the progress bar has the line


def reward(completions: Any, answer: list[str], **_: Any) -> list[float]:
    """Whether the number is in the answer."""
    pairs = zip(completions, answer, strict=True)
    return [float(number in completion[0]["content"]) for completion, number in pairs]


folder, precision = Path(sys.argv[1]), sys.argv[2]
threads, questions, samples, new_tokens = map(int, sys.argv[3:])
torch.set_num_threads(threads)
rows = map(json.loads, (folder / "questions.jsonl").read_text("utf-8").splitlines())
dataset = Dataset.from_list(
    [
        {
            "prompt": [{"role": "user", "content": row["question"]}],
            "answer": row["answer"].partition("####")[2].strip(),
        }
        for row in rows
    ]
)
config = GRPOConfig(
    output_dir=str(folder / "trl-start"),
    per_device_train_batch_size=questions * samples,
    num_generations=samples,
    max_completion_length=new_tokens,
    max_steps=2,
    learning_rate=1e-6,
    use_cpu=not torch.cuda.is_available(),
    bf16=precision == "bfloat16",
    gradient_checkpointing=False,
    beta=0.0,
    save_strategy="no",
    report_to=[],
)
trainer = GRPOTrainer(
    model=str(folder / "model"), reward_funcs=reward, args=config, train_dataset=dataset
)
trainer.add_callback(Telling())
trainer.train()
