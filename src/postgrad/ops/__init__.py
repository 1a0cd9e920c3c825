"""Pure tensor functions: KL, advantages, losses, weights. No settings, no I/O, no collectives."""
