"""Ways of weights from a learner to an engine, one file each. vLLM's workers import them."""
