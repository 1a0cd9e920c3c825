"""Floating-point operations of a forward pass, by kind."""

from dataclasses import dataclass

MULTIPLY_ADD = 2  # FLOPs


@dataclass(frozen=True, slots=True)
class ForwardFlops:
    """Floating-point operations of one forward pass; a multiplication and an addition are two.

    Norms, rotations and activations, under a hundredth of it, are left out.
    """

    body: float  # products with the weight matrices of the layers
    attention: float  # products of queries with keys, and of attention weights with values
    head: float  # products of hidden states with the output matrix
