"""Pure tensor functions: logprobs, KL, advantages, losses. No configuration, no I/O, no collectives."""
