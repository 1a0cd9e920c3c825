"""Unsloth's loaders, whose models train in TRL's trainers."""

from datasets import load_dataset
from trl import DPOConfig, DPOTrainer
from unsloth import FastLanguageModel

max_seq_length = 4096
model, tokenizer = FastLanguageModel.from_pretrained(
    model_name="unsloth/Qwen3-8B", max_seq_length=max_seq_length, load_in_4bit=True
)
model = FastLanguageModel.get_peft_model(
    model, r=32, lora_alpha=64, use_gradient_checkpointing="unsloth", random_state=3407
)
halves = load_dataset("trl-lib/ultrafeedback_binarized", split="train").train_test_split(
    test_size=0.05, seed=1
)
trainer = DPOTrainer(
    model=model,
    ref_model=None,
    tokenizer=tokenizer,
    args=DPOConfig(beta=0.05, per_device_train_batch_size=2, eval_strategy="epoch"),
    train_dataset=halves["train"],
    eval_dataset=halves["test"],
)
trainer.train()
