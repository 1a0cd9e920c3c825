"""A server with OpenAI's interface as a rollout engine: it takes no weights, so it evaluates."""
