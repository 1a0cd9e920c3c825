"""Loading and making models, tree attention, output heads, Hugging Face export."""
