"""The tower of a model that reads images: pixels to the embeddings of an image's tokens.

Every type of transformers that reads images has `get_image_features`. An image is encoded once for
each forward pass that it is in, however many sequences share it. A learner encodes several small
images in one call: alone they would be launches and little work.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from postgrad.core.errors import RunError
from postgrad.layout.layout import ImageRows, Layout
from postgrad.models.attention import Pictures, to_device
from postgrad.models.linear import multiply
from postgrad.models.towers import AT_ONCE

# In the names of weights: what brings the tower's outputs to the decoder's width, and the tower.
PROJECTOR = re.compile(
    r"\.(merger|deepstack_merger_list|multi_modal_projector|connector)\.|\.image_newline$"
)
TOWER = re.compile(r"\.(visual|vision_tower|vision_model)\.")
Pixels = Mapping[str, NDArray[Any]]  # what an image processor of transformers gives for an image


def image_part(name: str) -> Literal["vision", "projector"] | None:
    """Whether the weight `name` of the hub is the tower's ("vision") or the projector's; None: the
    decoder's.
    """
    if PROJECTOR.search(name):
        return "projector"
    return "vision" if TOWER.search(name) else None


class _PatchProduct:
    """The forward of a convolution whose kernels lie side by side, as a product: each patch is read
    once. On GPUs cuDNN takes up to seconds for Qwen-VL's in bfloat16 (transformers #45041, #45750).
    """

    weight: nn.Parameter
    bias: nn.Parameter | None
    kernel_size: tuple[int, ...]

    def forward(self, input: Tensor) -> Tensor:
        """input: [N, channels, *sides]; returns [N, outputs, *patches of each side]."""
        counts = [
            side // size for side, size in zip(input.shape[2:], self.kernel_size, strict=True)
        ]
        for number, size in enumerate(self.kernel_size):  # what is left at an end is not read
            input = input.narrow(2 + number, 0, counts[number] * size)
        pairs = [n for pair in zip(counts, self.kernel_size, strict=True) for n in pair]
        dims = range(2, 2 + len(pairs))
        patches = input.reshape(*input.shape[:2], *pairs).permute(0, *dims[::2], 1, *dims[1::2])
        weight = self.weight.flatten(1)
        products = multiply(patches.reshape(-1, weight.shape[1]), weight)
        if self.bias is not None:
            products = products + self.bias
        return products.view(len(input), *counts, len(weight)).movedim(-1, 1)


class PatchConv2d(_PatchProduct, nn.Conv2d):
    """Of pictures; takes the place of nn.Conv2d."""


class PatchConv3d(_PatchProduct, nn.Conv3d):
    """Of pictures and frames; takes the place of nn.Conv3d."""


def multiply_patches(lm: nn.Module) -> None:
    """Turns convolutions that cut images into patches into products. Parameters, their names and
    outputs stay the same, the outputs up to rounding.
    """
    kinds: dict[type[Any], type[Any]] = {nn.Conv2d: PatchConv2d, nn.Conv3d: PatchConv3d}
    convolutions: list[Any] = [m for m in lm.modules() if type(m) in kinds]  # no subclasses
    for module in convolutions:
        apart = module.stride == module.kernel_size and module.padding_mode == "zeros"
        plain = module.groups == 1 and set(module.dilation) == {1}
        if apart and plain and (module.padding == "valid" or set(module.padding) == {0}):
            module.__class__ = kinds[type(module)]


class ImageTower:
    """Encodes the images of layouts with the weights of `lm`, whose attention is as
    models.attention.implementation_of says.
    """

    def __init__(self, lm: nn.Module, pixels: Callable[[str], Pixels]) -> None:
        """pixels: of the image with a hash. Patches of `lm` become products (multiply_patches)."""
        multiply_patches(lm)
        self._lm: Any = lm
        self._pixels = pixels

    def pictures(
        self,
        layout: Layout,
        *,
        on_ranks: bool = False,
        run: range | None = None,
        at_once: int = AT_ONCE,
    ) -> Pictures | None:
        """The features of a layout's images, with gradients; None where it has none, and
        nothing is learned on several ranks. run: the rows that this rank computes, where ranks
        share the layout: images that have none there are not encoded, and rows count from its
        start. at_once: numbers of pixels in one call of the tower; 0 encodes each image alone, so
        that its bits do not depend on the others. Raises RunError where the tower gives an image
        another number of tokens than it has.
        """
        used = self._used() if on_ranks and torch.is_grad_enabled() else None
        images = [image for image in layout.images if run is None or _inside(image, run).any()]
        if not images:
            return None if used is None else _no_pictures(self._lm, used)
        encoded: dict[str, tuple[Tensor, ...]] = {}
        for together in self._calls(dict.fromkeys(image.digest for image in images), at_once):
            encoded |= self.encoded(together)
        for image in images:
            if len(encoded[image.digest][0]) != len(image.rows):
                raise RunError(
                    f"image {image.digest}: the model gives it {len(encoded[image.digest][0])} "
                    f"tokens, and its sequence has {len(image.rows)}: its image processor is of "
                    "another model"
                )
        rows = np.concatenate([image.rows for image in images])
        columns = zip(*(encoded[image.digest] for image in images), strict=True)
        features, *deeper = [torch.cat(parts) for parts in columns]
        if run is not None:
            inside = np.concatenate([_inside(image, run) for image in images])
            here = to_device(np.flatnonzero(inside), features.device)
            features, *deeper = [each.index_select(0, here) for each in (features, *deeper)]
            rows = rows[inside] - run.start
        if used is not None:
            features = features + used
        return Pictures(to_device(rows, features.device), features, tuple(deeper))

    def _calls(self, digests: Iterable[str], at_once: int) -> Iterator[dict[str, Pixels]]:
        """Images that go into a call together: their pixels have one shape but for the first
        dimension, and are no more than `at_once` numbers.
        """
        waiting: dict[tuple[Any, ...], dict[str, Pixels]] = {}
        numbers: dict[tuple[Any, ...], int] = {}
        for digest in digests:
            pixels = self._pixels(digest)
            shapes = tuple((name, *array.shape[1:]) for name, array in pixels.items())
            more = sum(array.size for array in pixels.values())
            if shapes in waiting and numbers[shapes] + more > at_once:
                yield waiting.pop(shapes)
            if shapes not in waiting:
                waiting[shapes], numbers[shapes] = {}, 0
            waiting[shapes][digest] = pixels
            numbers[shapes] += more
        yield from waiting.values()

    def _used(self) -> Tensor:
        """0, with a gradient of 0 for every trained weight of the tower. Ranks whose sequences have
        no image add gradients with those that encode some: all of them have to have the same ones.
        """
        zero = torch.zeros((), device=self._lm.device)
        for name, weight in self._lm.named_parameters():
            if weight.requires_grad and image_part(name):
                zero = zero + weight.reshape(-1)[:0].sum()
        return zero

    def encoded(self, images: Mapping[str, Pixels]) -> dict[str, tuple[Tensor, ...]]:
        """[tokens, hidden] of each image, and of each layer that adds more of it (Qwen3-VL): all of
        them in one call of the tower.
        """
        model, device = self._lm.model, self._lm.device
        all_pixels = [*images.values()]
        arrays = {
            name: torch.as_tensor(np.concatenate([pixels[name] for pixels in all_pixels]))
            for name in all_pixels[0]
        }
        named = {
            name: array.to(device, self._lm.dtype if array.is_floating_point() else None)
            for name, array in arrays.items()
        }
        out = model.get_image_features(**named, return_dict=True)
        sizes = [len(pixels["pixel_values"]) for pixels in all_pixels]
        features = _of_each(out.pooler_output, sizes)
        tokens = [len(each) for each in features]
        deeper = getattr(out, "deepstack_features", None) or ()
        layers = [features, *(_of_each(layer, tokens) for layer in deeper)]
        return dict(zip(images, zip(*layers, strict=True), strict=True))


def _no_pictures(lm: Any, used: Tensor) -> Pictures:
    """Of a layout without images. used: what the tower's weights get their gradient from."""
    rows = torch.zeros(0, dtype=torch.int64, device=used.device)
    return Pictures(rows, used.expand(0, lm.config.get_text_config().hidden_size))


def _inside(image: ImageRows, run: range) -> NDArray[np.bool_]:
    """[tokens] which of an image's tokens lie in a run of rows."""
    return (image.rows >= run.start) & (image.rows < run.stop)


def encoder_of(
    layout: Layout, tower: ImageTower | None, *, on_ranks: bool, run: range | None = None
) -> Callable[[], Pictures | None]:
    """Computes the features of a layout's images when it is called, which is within the forward
    pass; on_ranks, run: see ImageTower.pictures. Raises RunError where the model reads none.
    """
    if tower is None:
        raise RunError("a sequence has an image, which this model does not read")
    return partial(tower.pictures, layout, on_ranks=on_ranks, run=run)


def _of_each(features: Any, sizes: Sequence[int]) -> list[Tensor]:
    """The tokens of each image, whether a type gives a tensor for each or one for all of them,
    whose first dimension has so many entries for each.
    """
    if len(sizes) == 1 and not isinstance(features, Tensor):
        features = [torch.cat([*features])]
    parts = features.split([*sizes]) if isinstance(features, Tensor) else features
    return [part.reshape(-1, part.shape[-1]) for part in parts]
