"""What a model's own image processor makes of an image: pixels for its tower, tokens in its text.

The processor is transformers', on Pillow, so that it needs no torchvision. A chat template writes
one placeholder for an image; here that becomes the text that the model was trained on, with one
token for each embedding of the tower.
"""

import hashlib
import json
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray
from transformers import AutoImageProcessor
from transformers.utils.hub import cached_file

from postgrad.core.errors import UsageError
from postgrad.core.hub import pretrained
from postgrad.core.media import ImageStore, decoded, image_store
from postgrad.core.records import PlacedImage
from postgrad.models.config import reading
from postgrad.models.files import weights_source
from postgrad.models.image_sizes import anyres_tokens
from postgrad.models.images import ImageTower, Pixels
from postgrad.models.load import LoadedModel
from postgrad.models.supported import reads_images
from postgrad.models.towers import KEPT_BYTES, cut_of, more_tokens, most_tiles, side_of

# The last one is of transformers' processors, which vLLM and AutoProcessor read.
PROCESSOR_FILES = (
    "preprocessor_config.json",
    "video_preprocessor_config.json",
    "processor_config.json",
)
# Of get_image_features.
INPUTS = ("pixel_values", "image_grid_thw", "pixel_attention_mask", "image_sizes")
MARKS = "[IMG_BREAK]", "[IMG_END]"  # of Pixtral: behind a row of an image, and behind the last one


@dataclass(frozen=True, slots=True)
class ImageText:
    """An image in a text."""

    text: str  # in place of the placeholder of the chat template
    tokens: int  # how often `text` has the token that gets an embedding
    grid: tuple[int, int] | None = None  # as PlacedImage.grid


class KeptPixels:
    """The processed images that were used last, by image processor and hash: models of a process
    that read images alike share them. For several threads.
    """

    def __init__(self, most_bytes: int) -> None:
        self._most = most_bytes
        self._lock = threading.Lock()
        self._kept: OrderedDict[tuple[str, str], Pixels] = OrderedDict()
        self.nbytes = 0

    def get(self, processor: str, digest: str) -> Pixels | None:
        """Those of an image, where they are kept."""
        with self._lock:
            if (processor, digest) not in self._kept:
                return None
            self._kept.move_to_end((processor, digest))
            return self._kept[processor, digest]

    def add(self, processor: str, digest: str, pixels: Pixels) -> None:
        """Keeps an image, and drops those that were not used for the longest time."""
        with self._lock:
            if (processor, digest) in self._kept:
                return
            self._kept[processor, digest] = pixels
            self.nbytes += _size(pixels)
            while self.nbytes > self._most:
                _, dropped = self._kept.popitem(last=False)
                self.nbytes -= _size(dropped)


def _size(pixels: Pixels) -> int:
    return sum(array.nbytes for array in pixels.values())


KEPT: WeakKeyDictionary[ImageStore, KeptPixels] = WeakKeyDictionary()


def kept_pixels() -> KeptPixels:
    """Those of the images of the store that is in use: another run finds none of them."""
    return KEPT.setdefault(image_store(), KeptPixels(KEPT_BYTES))


def processor_files(path: str) -> list[Path]:
    """The files of the image processor of a directory or hub id."""
    name, at = pretrained(weights_source(path))
    quiet = {"_raise_exceptions_for_missing_entries": False, **at}
    with reading(f"no image processor at {path}", "a hub id needs the network, or fetched files"):
        files = [cached_file(name, file, **quiet) for file in PROCESSOR_FILES]
    return [Path(file) for file in files if file is not None]


class ImageReader:
    """Reads images, by the hash of their file, for one model."""

    def __init__(self, path: str, config: Any, tokenizer: Any) -> None:
        """config, tokenizer: of the model at `path`. Raises UsageError where it has no image
        processor, or one with an option that is not supported here.
        """
        path = weights_source(path)
        name, at = pretrained(path)
        wanted = "a model that reads images has a preprocessor_config.json"
        with reading(f"no image processor at {path}", wanted):
            self._processor: Any = AutoImageProcessor.from_pretrained(
                name, trust_remote_code=False, backend="pil", **at
            )
        if getattr(self._processor, "do_pan_and_scan", None):
            raise UsageError(
                f"{path}: its image processor cuts images into crops (do_pan_and_scan), which is "
                "not supported: set it to false in preprocessor_config.json"
            )
        self._config = config
        self.token_id: int = config.image_token_id
        self.token = str(tokenizer.convert_ids_to_tokens(self.token_id))
        self.placeholder = self.token
        # The same image has other tokens where its conversation has several (LLaVA-OneVision).
        self.single: bool = config.model_type == "llava_onevision"
        self._cut = cut_of(config.to_dict())
        self._mutual = self._cut == "square"
        if self._cut == "square":
            begin, end = config.boi_token_id, config.eoi_token_id
            self.placeholder, self._end = tokenizer.convert_ids_to_tokens([begin, end])
        elif self._cut == "crops":
            begin = getattr(tokenizer, "start_image_token", None) or "<img>"
            self._around = begin, getattr(tokenizer, "end_image_token", None) or "</img>"
        self._write: Callable[[Any], ImageText] = {
            "grid": self._plain,
            "square": self._surrounded,
            "whole": self._square,
            "tiles": self._tiled,
            "crops": self._cropped,
            "anyres": self._unpadded,
            "rows": self._in_rows,
        }[self._cut]
        self._texts: dict[str, ImageText] = {}

    @cached_property
    def fingerprint(self) -> str:
        """A hash of what decides the tokens of an image."""
        options = self._processor.to_json_string()
        sizes = json.dumps(self._config.to_dict(), default=str, sort_keys=True)
        return hashlib.sha256(f"{options}\n{sizes}".encode()).hexdigest()

    def pixels(self, digest: str) -> Pixels:
        """What the tower takes of an image, which nobody changes: others get the same arrays."""
        pixels = kept_pixels().get(self.fingerprint, digest)
        return self._read(digest) if pixels is None else pixels

    def inputs(self, picture: Any, name: str) -> Pixels:
        """What the tower takes of a PIL image. name: of the image, for messages."""
        return _inputs(self._processed(picture, name))

    def together(self, digests: Sequence[str]) -> Pixels:
        """What transformers' own forward takes of several images of one sequence."""
        pictures = [decoded(image_store().read(digest)) for digest in digests]
        return _inputs(self._processor(images=pictures, return_tensors="np", **self._asked))

    def show(self, digest: str, picture: Any) -> Pixels:
        """What the tower takes of a PIL image that no store has, and whose text is known from now
        on, until `forget`.
        """
        name = f"image {digest}"
        processed = self._processed(picture, name)
        self._texts[digest] = self._write(processed)
        return _inputs(processed)

    def forget(self, digest: str) -> None:
        """Drops what is known of an image."""
        self._texts.pop(digest, None)

    def text(self, digest: str) -> ImageText:
        """What stands in a text for an image."""
        if digest not in self._texts:
            self._read(digest)
        return self._texts[digest]

    def _read(self, digest: str) -> Pixels:
        """Those of an image of the store, which are kept with its text."""
        pixels = self.show(digest, decoded(image_store().read(digest)))
        kept_pixels().add(self.fingerprint, digest, pixels)
        return pixels

    def placed(
        self, ids: NDArray[np.int32], digests: Sequence[str]
    ) -> tuple[PlacedImage, ...] | None:
        """The images whose tokens are among ids [T]: the first of `digests`, as many as there are.
        None where the tokens are not those of whole images.
        """
        at = np.flatnonzero(ids == self.token_id)
        images: list[PlacedImage] = []
        for digest in digests:
            if not len(at):
                break
            image = self.text(digest)
            if len(at) < image.tokens:
                return None
            images.append(PlacedImage(digest, at[: image.tokens], image.grid, self._mutual))
            at = at[image.tokens :]
        return None if len(at) else tuple(images)

    def _processed(self, picture: Any, name: str) -> Any:
        try:
            return self._processor(images=[picture], return_tensors="np", **self._asked)
        except ValueError as error:  # a picture that is 200 times as wide as high, say
            raise UsageError(
                f"{name} of {picture.width} x {picture.height} pixels is refused by the "
                f"model's image processor: {error}"
            ) from error

    @property
    def _asked(self) -> dict[str, Any]:
        """What the model's own processor asks its image processor for."""
        if self._cut == "rows":
            return {"patch_size": self._unit}
        named = {"tiles": "return_row_col_info", "crops": "crop_to_patches"}.get(self._cut)
        return {} if named is None else {named: True}

    @property
    def _unit(self) -> int:
        """Pixels of the side of what becomes a token, where an image keeps its proportions."""
        merged = getattr(self._config, "spatial_merge_size", 1)
        return int(self._config.vision_config.patch_size * merged)

    def _plain(self, processed: Any) -> ImageText:
        """Qwen2.5-VL and Qwen3-VL: the template writes what surrounds an image."""
        _, rows, columns = (int(count) for count in processed["image_grid_thw"][0])
        merged = self._config.vision_config.spatial_merge_size
        grid = rows // merged, columns // merged
        count = grid[0] * grid[1]
        return ImageText(self.token * count, count, grid)

    def _surrounded(self, processed: Any) -> ImageText:
        """Gemma 3: a fixed number of tokens between two marks, in lines of their own."""
        count: int = self._config.mm_tokens_per_image
        return ImageText(f"\n\n{self.placeholder}{self.token * count}{self._end}\n\n", count)

    def _tiled(self, processed: Any) -> ImageText:
        """Idefics 3 and SmolVLM: the tiles of a large image row by row, each with its place, then
        all of it.
        """
        vision = self._config.vision_config
        side = vision.image_size // vision.patch_size // self._config.scale_factor
        each, mark = self.token * side**2, "<fake_token_around_image>"
        rows, columns = int(processed["rows"][0][0]), int(processed["cols"][0][0])
        lines = [
            "".join(f"{mark}<row_{row}_col_{column}>{each}" for column in range(1, columns + 1))
            for row in range(1, rows + 1)
        ]
        tiles = "".join(f"{line}\n" for line in lines) + ("\n" if lines else "")
        text = f"{tiles}{mark}<global-img>{each}{mark}"
        return ImageText(text, side**2 * (rows * columns + 1))

    def _square(self, processed: Any) -> ImageText:
        """LLaVA and ViP-LLaVA: a token for each patch of a square."""
        vision = self._config.vision_config
        height, width = processed["pixel_values"].shape[-2:]
        if not height == width == vision.image_size:
            raise UsageError(
                f"the image processor of this {self._config.model_type} model makes images of "
                f"{height} x {width} pixels, and its tower reads {vision.image_size} x "
                f"{vision.image_size}: set size and crop_size in preprocessor_config.json to that"
            )
        count = (height // vision.patch_size) ** 2 + more_tokens(self._config.to_dict())
        return ImageText(self.token * count, count)

    def _unpadded(self, processed: Any) -> ImageText:
        """LLaVA-NeXT and LLaVA-OneVision: the whole image, and its tiles without their padding."""
        vision = self._config.vision_config
        height, width = (int(side) for side in processed["image_sizes"][0])
        pinpoints, tile = self._config.image_grid_pinpoints, vision.image_size
        side, most = tile // vision.patch_size, most_tiles(self._config.to_dict())
        count = anyres_tokens(height, width, pinpoints, tile, side, most)
        return ImageText(self.token * count, count)

    def _in_rows(self, processed: Any) -> ImageText:
        """Pixtral's tower: rows, each with a mark behind it."""
        rows, columns = (int(side) // self._unit for side in processed["image_sizes"][0])
        if rows * columns == 1 and self._config.model_type == "mistral3":
            raise UsageError(
                f"an image of {self._unit} x {self._unit} pixels or less is one token, which "
                "transformers does not encode for a mistral3 model: scale it up"
            )
        behind, end = MARKS
        text = behind.join([self.token * columns] * rows) + end
        return ImageText(text, rows * columns)

    def _cropped(self, processed: Any) -> ImageText:
        """InternVL: crops and the whole image between two marks."""
        vision = self._config.vision_config
        side = side_of(vision.image_size) // side_of(vision.patch_size)
        each = round((side * self._config.downsample_ratio) ** 2)
        count = each * len(processed["pixel_values"])
        begin, end = self._around
        return ImageText(f"{begin}{self.token * count}{end}", count)


def _inputs(processed: Any) -> Pixels:
    return {name: np.asarray(processed[name]) for name in INPUTS if name in processed}


def tower_of(model: LoadedModel) -> ImageTower | None:
    """What encodes images for a model; None for one that reads text alone."""
    if not reads_images(model.config):
        return None
    return ImageTower(model.lm, ImageReader(model.source, model.config, model.tokenizer).pixels)
