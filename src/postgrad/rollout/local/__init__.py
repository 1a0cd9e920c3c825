"""The built-in engine: continuous batching over a key-value cache, with transformers' modules."""
