"""A server with OpenAI's interface as a rollout engine, for evaluation: it takes no weights."""
