"""Taking over weights by their Hugging Face names."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from postgrad.rollout.weights import checked


@torch.no_grad()
def take_over(
    lm: nn.Module, weights: Iterable[tuple[str, Tensor]], *, borrow: bool = False
) -> None:
    """Every weight comes into `lm`, in its dtype and on its device. Raises RunError as `checked`.

    borrow: one that is so already is read where it lies from now on, not copied: whoever changes it
    in place has changed `lm`. Those that a decoder has laid side by side are copied all the same.
    """
    for _, parameter, tensor in checked(lm, weights):
        alike = tensor.dtype == parameter.dtype and tensor.device == parameter.device
        alone = parameter.untyped_storage().nbytes() == parameter.nbytes
        if borrow and alike and alone and tensor.is_contiguous():
            parameter.data = tensor.detach()
        else:
            parameter.copy_(tensor)
