"""Convolutions that cut an image into patches, as products."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from helpers.image_directories import models
from postgrad.models.images import ImageTower, PatchConv2d, PatchConv3d, multiply_patches
from postgrad.models.load import load_model
from postgrad.models.towers import CUTS

__all__ = ["models"]


@pytest.mark.parametrize(
    ("make_convolution", "sides"),
    [
        (lambda: nn.Conv2d(3, 5, 4, stride=4, padding="valid"), (8, 11)),  # three columns are left
        (lambda: nn.Conv2d(3, 5, (2, 3), stride=(2, 3), bias=False), (4, 9)),
        (lambda: nn.Conv3d(3, 5, (2, 4, 4), stride=(2, 4, 4), bias=False), (2, 4, 4)),
        (lambda: nn.Conv3d(1, 2, 2, stride=2), (4, 6, 2)),
    ],
)
def test_the_products_are_torchs_convolution_with_its_gradients(
    make_convolution: Callable[[], Any], sides: tuple[int, ...]
) -> None:
    torch.manual_seed(0)
    conv = make_convolution().double()
    x = torch.randn(3, conv.in_channels, *sides, dtype=torch.float64, requires_grad=True)

    def outcome() -> list[Tensor]:
        out = conv(x)
        weights = torch.linspace(-1.0, 1.0, out.numel(), dtype=torch.float64).view_as(out)
        trained = [x, *conv.parameters()]
        return [out.detach(), *torch.autograd.grad((out * weights).sum(), trained)]

    expected, names = outcome(), [name for name, _ in conv.named_parameters()]
    multiply_patches(conv)
    assert type(conv) in (PatchConv2d, PatchConv3d)
    assert [name for name, _ in conv.named_parameters()] == names
    for ours, theirs in zip(outcome(), expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    "conv",
    [
        nn.Conv2d(3, 4, 3, stride=2),  # kernels overlap
        nn.Conv2d(3, 4, 2, stride=2, padding=1),
        nn.Conv2d(4, 4, 2, stride=2, groups=2),
        nn.Conv2d(3, 4, 2, stride=2, dilation=2),
        nn.Conv1d(3, 4, 2, stride=2),
    ],
    ids=str,
)
def test_other_convolutions_stay_as_they_are(conv: nn.Module) -> None:
    kind = type(conv)
    multiply_patches(conv)
    assert type(conv) is kind


@pytest.mark.parametrize("kind", sorted(CUTS))
def test_no_type_is_left_with_a_convolution(kind: str, models: Callable[[str], str]) -> None:
    lm = load_model(models(kind), dtype=torch.float32, images=True).lm
    ImageTower(lm, lambda _: {})
    kinds = [type(m) for m in lm.modules() if isinstance(m, nn.Conv2d | nn.Conv3d)]
    assert kinds
    assert set(kinds) <= {PatchConv2d, PatchConv3d}
