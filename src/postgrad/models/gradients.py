"""Gradients of large weights, added where they lie.

autograd makes a gradient whole before it adds it to those of earlier micro-batches. The matrix of a
head with 152 000 words has 0.16 to 1.2 GB, and would be held three times: the sum so far, the next
one, and in the head, which is computed in chunks of entries, a sum of its own. So who computes the
gradient of a weight with more than PART numbers adds it to `weight.grad`; autograd gets none.
"""

import torch
from torch import Tensor

PART = 2**24  # numbers of a weight; what is added to a larger one is made a part at a time


def adds_in_place(weight: Tensor) -> bool:
    """Whether a weight's gradient is added in place. To be asked in the forward pass, of the weight
    itself: what a backward pass has saved may be a copy (gradient checkpointing makes one). Hooks
    on the gradient would not be called: the learner has some on weights that are not float32.
    """
    large = weight.dtype == torch.float32 and weight.numel() > PART
    return large and weight.requires_grad and weight.is_leaf


def gradient_of(weight: Tensor) -> Tensor:
    """A weight's gradient so far, to add to."""
    if weight.grad is None:
        weight.grad = torch.zeros_like(weight)
    return weight.grad
