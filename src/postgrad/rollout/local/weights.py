"""Taking over weights by their Hugging Face names."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from postgrad.rollout.weights import checked


@torch.no_grad()
def copy_weights(lm: nn.Module, weights: Iterable[tuple[str, Tensor]]) -> None:
    """Copy every weight into `lm`, converting dtype and device. Raises RunError as `checked`."""
    for _, parameter, tensor in checked(lm, weights):
        parameter.copy_(tensor)
