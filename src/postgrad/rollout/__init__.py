"""The built-in rollout engine, environments and sources of samples."""
