"""One GRPO step: 16 questions, 8 samples of 128 new tokens each, one optimizer step."""
