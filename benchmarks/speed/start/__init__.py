"""From the start of a process to the end of its first optimizer step: 2 questions, 2 x 8 tokens."""
