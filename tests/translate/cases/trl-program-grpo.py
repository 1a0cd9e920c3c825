"""Rewards of TRL's, of the program and of another file; rows that it changes."""

import argparse

from datasets import load_dataset
from my_project.scores import brevity
from trl import GRPOConfig, GRPOTrainer
from trl.rewards import accuracy_reward, get_soft_overlong_punishment

SYSTEM = "Think first."


def in_english(completions, **kwargs):
    return [float(completion[0]["content"].isascii()) for completion in completions]


def as_chat(row):
    question = {"role": "user", "content": row["question"]}
    return {"prompt": [{"role": "system", "content": SYSTEM}, question], "solution": row["answer"]}


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="Qwen/Qwen3-1.7B")
    parser.add_argument("--lr", type=float, default=1e-6)
    flags = parser.parse_args()
    rows = load_dataset("openai/gsm8k", "main")["train"].shuffle(seed=1)
    rows = rows.filter(lambda row: len(row["answer"]) > 20)
    trainer = GRPOTrainer(
        flags.model,
        [accuracy_reward, in_english, brevity, get_soft_overlong_punishment(1024, 256)],
        args=GRPOConfig(
            learning_rate=flags.lr,
            reward_weights=[1.0, 0.1, 0.1, 1.0],
            max_completion_length=1024,
            num_generations=8,
            per_device_train_batch_size=8,
            gradient_accumulation_steps=4,
            max_steps=100,
            use_vllm=True,
            temperature=0.9,
        ),
        train_dataset=rows.map(as_chat),
        tools=[in_english],
    )
    trainer.train()
