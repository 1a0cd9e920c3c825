# words: --dataloader_num_workers 4
"""An adapter over weights in four bits, and another split to evaluate on."""

import os
from dataclasses import dataclass, field

import torch
from datasets import load_dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig
from trl import SFTConfig, SFTTrainer

BASE = os.environ.get("BASE_MODEL", "Qwen/Qwen3-0.6B")


@dataclass
class Run:
    rows: int = 10 * 1000
    layers: list[str] = field(default_factory=lambda: ["q_proj", "v_proj"])


def load(split: str, rows: int | None = None):
    dataset = load_dataset("trl-lib/Capybara", split=split)
    return dataset if rows is None else dataset.select(range(rows))


def main() -> None:
    run = Run()
    sizes = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 64 // 4}
    args = SFTConfig(
        output_dir=f"out/{BASE.split('/')[-1]}-sft",
        num_train_epochs=2,
        max_length=2048,
        eval_strategy="steps",
        eval_steps=100,
        **sizes,
    )
    args.learning_rate = 2e-4
    if torch.cuda.device_count() > 1:
        args.tf32 = True
    model = AutoModelForCausalLM.from_pretrained(
        BASE,
        attn_implementation="sdpa",
        quantization_config=BitsAndBytesConfig(load_in_4bit=True),
    )
    model.config.use_cache = False
    tokenizer = AutoTokenizer.from_pretrained(BASE)
    tokenizer.pad_token = tokenizer.eos_token
    trainer = SFTTrainer(
        model=model,
        args=args,
        processing_class=tokenizer,
        train_dataset=load("train", run.rows),
        eval_dataset=load("test"),
        peft_config=LoraConfig(r=16, lora_alpha=32, target_modules=run.layers),
    )
    trainer.train(resume_from_checkpoint=True)


if __name__ == "__main__":
    main()
