"""Weights for an engine, by their Hugging Face names: checked, cut into portions, put in place."""

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn

from postgrad.core.errors import RunError


def checked(
    lm: nn.Module, weights: Iterable[tuple[str, Tensor]]
) -> Iterator[tuple[str, nn.Parameter, Tensor]]:
    """(name, parameter of `lm`, new weight) for each of `weights`.

    A tied weight may come under either of its names. Raises RunError when one is unknown, missing
    or of another shape: a sampler with half of the new weights is worse than none.
    """
    parameters = dict(lm.named_parameters(remove_duplicate=False))
    missing = {id(parameter): name for name, parameter in parameters.items()}
    for name, tensor in weights:
        parameter = parameters.get(name)
        if parameter is None:
            raise RunError(f"weights for the rollout engine: the model has no {name!r}")
        if parameter.shape != tensor.shape:
            raise RunError(
                f"weights for the rollout engine: {name} is {list(tensor.shape)}, "
                f"the model's is {list(parameter.shape)}"
            )
        yield name, parameter, tensor
        missing.pop(id(parameter), None)
    if missing:
        names = ", ".join(sorted(missing.values())[:3])
        raise RunError(
            f"weights for the rollout engine: {len(missing)} are missing, such as {names}"
        )


def portions(
    weights: Iterable[tuple[str, Tensor]], size: int
) -> Iterator[list[tuple[str, Tensor]]]:
    """`weights` in their order, in lists of up to `size` bytes, each of at least one weight."""
    portion: list[tuple[str, Tensor]] = []
    held = 0
    for name, weight in weights:
        if portion and held + weight.nbytes > size:
            yield portion
            portion, held = [], 0
        portion.append((name, weight))
        held += weight.nbytes
    if portion:
        yield portion


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
