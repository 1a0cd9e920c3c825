"""How many patches and tokens a model makes of an image, from its size in pixels alone.

The rules are those of transformers' image processors of models.settings.IMAGE_TYPES, which a test
compares them with. Free of torch and transformers, so that a plan counts images fast.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from postgrad.core.hub import local_file
from postgrad.models.files import read_object
from postgrad.models.towers import ImageCost, TowerShape

# What a processor's file may leave out (transformers' defaults).
QWEN_SIZE = {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 1280}  # pixels of an image
TILED_SIZE, TILE = {"longest_edge": 4 * 364}, {"longest_edge": 364}
LARGEST_SIDE = 4096  # pixels, of an image that SmolVLM cuts into tiles
CROP = {"height": 384, "width": 384}
PIXTRAL_SIZE = {"longest_edge": 1024}
PINPOINTS: dict[str, list[list[int]]] = {
    "llava_next": [[336, 672], [672, 336], [672, 672], [1008, 336], [336, 1008]],
    "llava_onevision": [[384 * high, 384 * wide] for high in range(1, 7) for wide in range(1, 7)],
}
LARGER = 1.1  # than most_tiles: how much an image's features may be before they are made smaller


@dataclass(frozen=True, slots=True)
class ImageSizes:
    """The image processor of one model. options: of its file."""

    tower: TowerShape
    options: Mapping[str, Any]

    def cost(self, width: int, height: int) -> ImageCost:
        """What the tower computes of an image of so many pixels."""
        tower = self.tower
        if tower.cut not in ("grid", "rows"):
            return self._squares(width, height)
        rows, columns = self._grid(width, height)
        count, window = rows * columns, tower.window
        return ImageCost(
            images=1,
            patches=count,
            tokens=count // tower.merged**2,
            full_pairs=count**2,
            window_pairs=_squared(rows, window) * _squared(columns, window) if window else 0,
        )

    def around(self, width: int, height: int, new_line: int) -> int:
        """Tokens that stand in a text around those of an image. new_line: tokens of "\\n\\n"."""
        match self.tower.cut:
            case "square":
                return 2 + 2 * new_line  # its two marks, in lines of their own
            case "tiles":
                rows, columns = self._tiles(width, height)
                return rows * (2 * columns + 1) + (1 if rows else 0) + 3
            case "rows":
                return self._grid(width, height)[0] // self.tower.merged
            case "whole" | "anyres":
                return 0
            case _:
                return 2

    def _squares(self, width: int, height: int) -> ImageCost:
        """That of images or tiles of one size."""
        tower = self.tower
        count, pixels = 1, tower.image_size
        if tower.cut == "tiles":
            rows, columns = self._tiles(width, height)
            count, pixels = rows * columns + 1, self._tile
        elif tower.cut == "crops":
            count, pixels = self._crops(width, height), self._sides("size", CROP)[0]
        elif tower.cut == "anyres":
            rows, columns = resolution(height, width, self._pinpoints)
            count = 1 + rows * columns // pixels**2
        side = tower.image_size // tower.patch_size // tower.merged
        tokens = count * side**2 + tower.more_tokens
        if tower.cut == "anyres":
            tokens = anyres_tokens(height, width, self._pinpoints, pixels, side, tower.most_tiles)
        patches = (pixels // tower.patch_size) ** 2
        return ImageCost(1, count * patches, tokens, count * patches**2)

    def _grid(self, width: int, height: int) -> tuple[int, int]:
        """Rows and columns of patches of an image that keeps its proportions: of Qwen's
        (smart_resize), or of Pixtral's tower.
        """
        patch, merged = self.tower.patch_size, self.tower.merged
        factor = patch * merged
        if self.tower.cut == "rows":
            longest = self._sides("size", PIXTRAL_SIZE)
            scale = max(height / longest[0], width / longest[1], 1.0)
            rows, columns = (
                math.ceil(math.floor(side / scale) / factor) for side in (height, width)
            )
            return rows * merged, columns * merged
        size = {**QWEN_SIZE, **(self.options.get("size") or {})}
        least = self.options.get("min_pixels") or size["shortest_edge"]
        most = self.options.get("max_pixels") or size["longest_edge"]
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

    def _sides(self, key: str, default: Mapping[str, int]) -> tuple[int, int]:
        """Height and width that an option states, or the longest side for both."""
        size = self.options.get(key) or default
        longest = size.get("longest_edge")
        return (longest, longest) if longest else (size["height"], size["width"])

    @property
    def _pinpoints(self) -> Sequence[Sequence[int]]:
        return self.options.get("image_grid_pinpoints") or PINPOINTS[self.tower.model_type]

    def _crops(self, width: int, height: int) -> int:
        """Crops of an image of InternVL's, with the whole image where there are several."""
        least, most = (
            int(self.options.get(k, d)) for k, d in (("min_patches", 1), ("max_patches", 12))
        )
        shapes = [
            (columns, rows)
            for columns in range(1, most + 1)
            for rows in range(1, most + 1)
            if least <= columns * rows <= most
        ]
        tile = math.prod(self._sides("size", CROP))
        best, difference = (1, 1), math.inf
        for columns, rows in sorted(shapes, key=math.prod):
            off = abs(width / height - columns / rows)
            larger = off == difference and width * height > 0.5 * tile * columns * rows
            if off < difference or larger:
                best, difference = (columns, rows), off
        count = math.prod(best)
        return count if count == 1 else count + 1

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


def resolution(height: int, width: int, pinpoints: Sequence[Sequence[int]]) -> tuple[int, int]:
    """Height and width of that of `pinpoints` in which most of an image is seen, and least is
    padding (select_best_resolution).
    """
    best, seen_there, wasted_there = (0, 0), 0, math.inf
    for high, wide in pinpoints:
        scale = min(wide / width, high / height)
        seen = min(int(width * scale) * int(height * scale), width * height)
        wasted = high * wide - seen
        if seen > seen_there or (seen == seen_there and wasted < wasted_there):
            best, seen_there, wasted_there = (int(high), int(wide)), seen, wasted
    return best


def anyres_tokens(
    height: int,
    width: int,
    pinpoints: Sequence[Sequence[int]],
    tile: int,
    side: int,
    most_tiles: int,
) -> int:
    """Tokens of an image of LLaVA-NeXT's: those of the whole image, and those of its tiles without
    padding, with one more for each row. tile: pixels of a tile's side; side: tokens of it;
    most_tiles: as TowerShape's.
    """
    high, wide = resolution(height, width, pinpoints)
    rows, columns = high // tile * side, wide // tile * side
    if width / height > columns / rows:
        rows -= 2 * ((rows - int(round(height * (columns / width), 7))) // 2)
    else:
        columns -= 2 * ((columns - int(round(width * (rows / height), 7))) // 2)
    if most_tiles:
        ratio = math.sqrt(rows * columns / (most_tiles * side**2))
        if ratio > LARGER:
            rows, columns = int(rows // ratio), int(columns // ratio)
    return side**2 + rows * columns + rows


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
