"""A run's roles on several ranks: what runs on a rank, and what stands for it in the loop."""
