"""Taking over weights by their Hugging Face names."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from postgrad.core.errors import RunError


@torch.no_grad()
def copy_weights(lm: nn.Module, weights: Iterable[tuple[str, Tensor]]) -> None:
    """Copy every weight into `lm`, converting dtype and device.

    A tied weight may come under either of its names. Raises RunError when one is unknown, missing
    or of another shape: a sampler with half of the new weights is worse than none.
    """
    own = dict(lm.named_parameters(remove_duplicate=False))
    missing = {parameter.data_ptr(): name for name, parameter in own.items()}
    for name, tensor in weights:
        parameter = own.get(name)
        if parameter is None:
            raise RunError(f"weights for the rollout engine: the model has no {name!r}")
        if parameter.shape != tensor.shape:
            raise RunError(
                f"weights for the rollout engine: {name} is {list(tensor.shape)}, "
                f"the model's is {list(parameter.shape)}"
            )
        parameter.copy_(tensor)
        missing.pop(parameter.data_ptr(), None)
    if missing:
        names = ", ".join(sorted(missing.values())[:3])
        raise RunError(
            f"weights for the rollout engine: {len(missing)} did not come, such as {names}"
        )
