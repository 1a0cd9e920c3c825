"""Gradients of large weights, added to `weight.grad` in place.

autograd first builds a whole gradient and then adds it to that of earlier micro-batches. The matrix
of an output head with 152 000 tokens takes 0.16 to 1.2 GB and would be held three times: the sum so
far, the next gradient, and the sum over the head's chunks of entries. So the backward pass of a
weight with more than LARGE_WEIGHT numbers adds to `weight.grad` itself and gives autograd None.
"""

import torch
from torch import Tensor

LARGE_WEIGHT = 2**24  # numbers of a weight; to the gradient of a larger one parts are added


def adds_in_place(weight: Tensor) -> bool:
    """Whether a weight's gradient is added in place.

    Ask in the forward pass, about the parameter itself: the tensor that a backward pass has saved
    may be a copy (gradient checkpointing makes one). Only for float32: hooks on the gradient are
    not called, and the learner has hooks on weights of other dtypes.
    """
    large = weight.dtype == torch.float32 and weight.numel() > LARGE_WEIGHT
    return large and weight.requires_grad and weight.is_leaf


def gradient_of(weight: Tensor) -> Tensor:
    """`weight.grad`, to add to; zeros where there is none yet."""
    if weight.grad is None:
        weight.grad = torch.zeros_like(weight)
    return weight.grad


def rows_at_once(weight: Tensor) -> int:
    """How many rows of a large weight's gradient [rows, columns] are computed and added at once."""
    return max(1, LARGE_WEIGHT // 16 // weight.shape[1])
