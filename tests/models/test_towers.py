"""Sizes and FLOPs of towers, against numbers worked out by hand."""

from typing import Any

import pytest

from helpers.image_models import IMAGE_MODELS, fresh
from postgrad.models.counted import counted_shape
from postgrad.models.image_sizes import ImageSizes
from postgrad.models.images import image_part
from postgrad.models.towers import ImageCost, TowerShape


def tower(kind: str) -> TowerShape:
    config: Any = IMAGE_MODELS[kind].config()
    shape = counted_shape({"model_type": kind, **config.to_dict()}, kind).tower
    assert shape is not None
    return shape


def test_the_flops_of_an_image_by_hand() -> None:
    """Qwen2.5-VL, 16 wide, 24 in feed-forwards, 2 layers, the first in windows of 4 x 4 patches."""
    shape = tower("qwen2_5_vl")
    cost = ImageSizes(shape, {"size": {"shortest_edge": 64, "longest_edge": 1024}}).cost(24, 16)
    # 4 x 6 patches; windows of 4 x 4 and of 4 x 2; 2 x 2 patches are a token
    assert cost == ImageCost(1, 24, 6, 24**2, 16**2 + 8**2)
    flops = shape.encoding(cost)
    # a patch has 3 colours, 2 frames, 4 x 4 pixels; a layer has q, k, v, out; gate, up, down
    layer = 4 * 16 * 16 + 3 * 16 * 24
    assert flops.body == 2 * 24 * (96 * 16 + 2 * layer) == 282_624
    assert flops.attention == 2 * 2 * (576 + 320) * 16 == 57_344
    assert shape.projecting(cost) == 2 * 6 * (64 * 64 + 64 * 32) == 73_728


@pytest.mark.parametrize("kind", IMAGE_MODELS)
def test_the_weights_of_tower_and_projector_are_counted(kind: str) -> None:
    shape, lm = tower(kind), fresh(kind)
    for freeze in (("vision",), ("projector",), ("vision", "projector")):
        named = lm.named_parameters()
        weights = sum(weight.numel() for name, weight in named if image_part(name) in freeze)
        assert shape.frozen(freeze) == weights > 0
