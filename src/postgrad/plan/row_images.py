"""Images of the rows of data as a plan counts them: the tokens that they become, and what the tower
computes of them, from their sizes in pixels.
"""

import math
from collections.abc import Mapping
from typing import Any

from postgrad.core.media import MARK, MeasuredImages
from postgrad.models.image_sizes import ImageSizes, image_sizes
from postgrad.models.known_shapes import shape_of_model
from postgrad.models.settings import ModelSettings
from postgrad.models.towers import ImageCost


class RowImages:
    """Counts the images of one row after the other. An image that a row has several times, as in
    both conversations of a pair, is encoded once.
    """

    def __init__(self, model: ModelSettings, store: MeasuredImages, new_line: int) -> None:
        """store: of the rows as they are read. new_line: tokens of "\\n\\n"."""
        self._model, self._store, self._new_line = model, store, new_line
        self._sizes: ImageSizes | None = None
        self._asked = False
        self._seen: set[str] = set()

    def begin(self) -> None:
        """The next row."""
        self._seen.clear()

    def tokens(self, message: Mapping[str, Any]) -> float:
        """Tokens of the images of a message, with those around them; nan where the model reads
        none. Raises UsageError where its shape cannot be found.
        """
        digests: list[str] = message.get("images", [])
        if not digests:
            return 0.0
        sizes = self._sizes_of_model()
        if sizes is None:
            return math.nan
        self._seen.update(digests)
        pixels = [self._store.sizes[digest] for digest in digests]
        return sum(
            sizes.cost(*each).tokens + sizes.around(*each, self._new_line) for each in pixels
        )

    def cost(self) -> ImageCost:
        """What the tower computes of the row's images."""
        total = ImageCost()
        for digest in sorted(self._seen):
            assert self._sizes is not None  # tokens were counted
            total += self._sizes.cost(*self._store.sizes[digest])
        return total

    def _sizes_of_model(self) -> ImageSizes | None:
        if not self._asked:  # the first image asks: a shape may take seconds
            self._asked = True
            tower = shape_of_model(self._model).tower
            self._sizes = None if tower is None else image_sizes(tower, self._model.source)
        return self._sizes


def without_marks(text: str) -> str:
    """A text without the places of its images."""
    return text.replace(MARK, "")
