"""vLLM as a rollout engine: processes in an environment of their own, which read JSON lines."""
