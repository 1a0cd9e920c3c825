"""How many patches and tokens a model makes of an image, from its size in pixels alone.

The rules are those of transformers' image processors of models.settings.IMAGE_TYPES, which a test
compares them with. Free of torch and transformers, so that a plan counts images fast.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from postgrad.core.hub import local_file
from postgrad.models.files import read_object
from postgrad.models.towers import ImageCost, TowerShape

# What a processor's file may leave out (transformers' defaults).
QWEN_SIZE = {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 1280}  # pixels of an image
TILED_SIZE, TILE = {"longest_edge": 4 * 364}, {"longest_edge": 364}
LARGEST_SIDE = 4096  # pixels, of an image that SmolVLM cuts into tiles


@dataclass(frozen=True, slots=True)
class ImageSizes:
    """The image processor of one model. options: of its file."""

    tower: TowerShape
    options: Mapping[str, Any]

    def cost(self, width: int, height: int) -> ImageCost:
        """What the tower computes of an image of so many pixels."""
        if self.tower.model_type == "gemma3":
            return self._squares(1)
        if self.tower.model_type == "smolvlm":
            rows, columns = self._tiles(width, height)
            return self._squares(rows * columns + 1)
        rows, columns = self._grid(width, height)
        window = self.tower.window
        count = rows * columns
        return ImageCost(
            images=1,
            patches=count,
            tokens=count // self.tower.merged**2,
            full_pairs=count**2,
            window_pairs=_squared(rows, window) * _squared(columns, window) if window else 0,
        )

    def around(self, width: int, height: int, new_line: int) -> int:
        """Tokens that stand in a text around those of an image. new_line: tokens of "\\n\\n"."""
        if self.tower.model_type == "gemma3":
            return 2 + 2 * new_line  # its two marks, in lines of their own
        if self.tower.model_type == "smolvlm":
            rows, columns = self._tiles(width, height)
            return rows * (2 * columns + 1) + (1 if rows else 0) + 3
        return 2

    def _squares(self, count: int) -> ImageCost:
        """That of images or tiles of one size."""
        tower = self.tower
        pixels = tower.image_size
        if tower.model_type == "smolvlm":
            pixels = self._tile
        patches = (pixels // tower.patch_size) ** 2
        tokens = (tower.image_size // tower.patch_size // tower.merged) ** 2
        return ImageCost(1, count * patches, count * tokens, count * patches**2)

    def _grid(self, width: int, height: int) -> tuple[int, int]:
        """Rows and columns of patches of an image of Qwen's, which keeps its proportions
        (smart_resize).
        """
        size = {**QWEN_SIZE, **(self.options.get("size") or {})}
        least = self.options.get("min_pixels") or size["shortest_edge"]
        most = self.options.get("max_pixels") or size["longest_edge"]
        patch, merged = self.tower.patch_size, self.tower.merged
        factor = patch * merged
        rows, columns = (round(side / factor) * factor for side in (height, width))
        if rows * columns > most:
            scale = math.sqrt(height * width / most)
            rows, columns = (
                max(factor, math.floor(side / scale / factor) * factor) for side in (height, width)
            )
        elif rows * columns < least:
            scale = math.sqrt(least / (height * width))
            rows, columns = (math.ceil(side * scale / factor) * factor for side in (height, width))
        return rows // patch, columns // patch

    @property
    def _tile(self) -> int:
        """Pixels of the side of a tile."""
        return int((self.options.get("max_image_size") or TILE)["longest_edge"])

    def _tiles(self, width: int, height: int) -> tuple[int, int]:
        """Rows and columns of the tiles that SmolVLM cuts an image into, beside the whole image;
        (0, 0) for one that is not cut.
        """
        if not self.options.get("do_image_splitting", True):
            return 0, 0
        tile = self._tile
        if self.options.get("do_resize", True):
            longest = int((self.options.get("size") or TILED_SIZE)["longest_edge"])
            height, width = _scaled(height, width, longest)
        proportion = width / height
        if width >= height:
            width = math.ceil(width / tile) * tile
            height = math.ceil(int(width / proportion) / tile) * tile
        else:
            height = math.ceil(height / tile) * tile
            width = math.ceil(int(height * proportion) / tile) * tile
        if height <= tile and width <= tile:
            return 0, 0
        return height // tile, width // tile


def image_sizes(tower: TowerShape, source: str | None) -> ImageSizes:
    """Those of a model of a directory, or of a hub id whose files are on this machine; else with
    the defaults of its type. source: None: no model is named.
    """
    return ImageSizes(tower, {} if source is None else _options(source))


def _options(source: str) -> Mapping[str, Any]:
    for name in ("preprocessor_config.json", "processor_config.json"):
        file = local_file(source, name)
        if file is not None:
            options = read_object(file)
            nested: Mapping[str, Any] = options.get("image_processor") or options
            return nested
    return {}


def _squared(length: int, window: int) -> int:
    """The sum of the squared lengths of the windows of a side."""
    return length // window * window**2 + (length % window) ** 2


def _scaled(height: int, width: int, longest: int) -> tuple[int, int]:
    """An image whose longer side has `longest` pixels, LARGEST_SIDE at most; the other is even."""
    proportion = width / height
    if width >= height:
        width, height = longest, int(longest / proportion)
        height += height % 2
    else:
        height, width = longest, int(longest * proportion)
        width += width % 2
    height, width = max(height, 1), max(width, 1)
    proportion = width / height
    if width >= height and width > LARGEST_SIDE:
        width, height = LARGEST_SIDE, int(LARGEST_SIDE / proportion)
    elif height > width and height > LARGEST_SIDE:
        height, width = LARGEST_SIDE, int(LARGEST_SIDE * proportion)
    return max(height, 1), max(width, 1)
