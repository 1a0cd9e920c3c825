"""Loading weights into the engine's model, by their Hugging Face names."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from postgrad.rollout.weights import checked


@torch.no_grad()
def take_over(
    lm: nn.Module, weights: Iterable[tuple[str, Tensor]], *, borrow: bool = False
) -> None:
    """Load all weights into `lm`, in its dtype and on its device. Raises RunError as `checked`.

    borrow: a weight that has both already is used without a copy, so a change in place changes
    `lm` too. Parameters that share memory, as a decoder packs some, are copied all the same.
    """
    for _, parameter, tensor in checked(lm, weights):
        alike = tensor.dtype == parameter.dtype and tensor.device == parameter.device
        alone = parameter.untyped_storage().nbytes() == parameter.nbytes
        if borrow and alike and alone and tensor.is_contiguous():
            parameter.data = tensor.detach()
        else:
            parameter.copy_(tensor)
