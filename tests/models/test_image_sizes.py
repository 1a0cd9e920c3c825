"""Sizes of images without decoding them: what transformers' processors make of each."""

from collections.abc import Callable

import numpy as np
import pytest
from PIL import Image

from helpers.image_directories import models
from helpers.image_models import IMAGE_MODELS
from postgrad.models.config import load_config
from postgrad.models.image_reader import ImageReader
from postgrad.models.image_sizes import ImageSizes, image_sizes
from postgrad.models.known_shapes import find_shape
from postgrad.models.tokenizer import load_tokenizer

__all__ = ["models"]

PIXELS = ((16, 16), (40, 16), (16, 24), (7, 60), (100, 33), (64, 64), (9, 5))  # width, height


def sizes_of(path: str) -> ImageSizes:
    tower = find_shape(path).tower
    assert tower is not None
    return image_sizes(tower, path)


@pytest.mark.parametrize("kind", IMAGE_MODELS)
def test_patches_and_tokens_are_those_of_the_image_processor(
    models: Callable[[str], str], kind: str
) -> None:
    path = models(kind)
    sizes, tokenizer = sizes_of(path), load_tokenizer(path)
    reader = ImageReader(path, load_config(path), tokenizer)

    def count(text: str) -> int:
        return len(tokenizer.encode(text, add_special_tokens=False))

    for width, height in PIXELS:
        picture = Image.fromarray(np.full((height, width, 3), 99, np.uint8))
        processed = reader._processed(picture, "a picture")
        written = reader._write(processed)
        values = np.asarray(processed["pixel_values"])
        cost = sizes.cost(width, height)
        assert cost.tokens == written.tokens
        assert cost.patches * sizes.tower.patch_values == values.size
        # Qwen's two marks are in the chat template
        in_template = 2 if kind.startswith("qwen") else 0
        around = count(written.text) - written.tokens + in_template
        assert sizes.around(width, height, count("\n\n")) == around


def test_an_image_beyond_the_processors_pixels_is_scaled(models: Callable[[str], str]) -> None:
    sizes = sizes_of(models("qwen2_5_vl"))  # 64 to 1024 pixels
    assert sizes.cost(3000, 3000).patches == 64
    assert sizes.cost(1, 1).patches == 4
