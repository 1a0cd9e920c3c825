"""One update of a reward model on HH-RLHF's pairs, at most 512 tokens a conversation."""
