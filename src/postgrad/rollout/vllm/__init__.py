"""vLLM as a rollout engine: processes with an environment of their own, spoken to in JSON lines."""
