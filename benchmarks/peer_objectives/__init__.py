"""Losses and gradients of the systems that `postgrad translate` reads, held to ours."""
