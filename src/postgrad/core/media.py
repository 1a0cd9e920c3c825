"""Images by their content: checked, and kept once each in a folder under the SHA-256 of their file.

Rows, tickets and checkpoints name an image by that hash. Nothing is fetched from a network.
"""

import base64
import hashlib
import io
import re
import warnings
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from postgrad.core.errors import RunError, UsageError
from postgrad.core.files import whole_file

IMAGES = "images"  # the folder of a run's images, in its directory
MARK = "\ufffc"  # OBJECT REPLACEMENT CHARACTER: an image stands there in a text
MOST_BYTES = 2**26  # of an image's file
MOST_PIXELS = 2**26  # a file of some kilobytes may hold a picture of gigabytes
LIMITS = MOST_BYTES, MOST_PIXELS  # of an image
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
PLAIN = "PNG", "JPEG", "WEBP"  # of these, which every program decodes
BEGINNINGS = {  # of files in these
    "png": re.compile(rb"\x89PNG\r\n\x1a\n"),
    "jpeg": re.compile(rb"\xff\xd8\xff"),
    "webp": re.compile(rb"RIFF.{4}WEBP", re.DOTALL),
    "gif": re.compile(rb"GIF8[79]a"),
    "bmp": re.compile(rb"BM"),
}
ORIENTATION, SIDEWAYS = 0x0112, (5, 6, 7, 8)  # the tag of Exif; values that swap the sides
TAGGED = b"eXIf", b"Raw profile type exif", b"XML:com.adobe.xmp"  # chunks of a PNG with that tag
NEEDED = "images are read with Pillow, which is not installed: pip install 'postgrad[images]'"


class ImageStore:
    """Files of images under their hashes. folder: None keeps none of them."""

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder
        self._others: list[Path] = []
        self._checked: set[str] = set()

    def add(self, content: bytes, limits: tuple[int, int] = LIMITS) -> str:
        """Checks an image, unless it was checked before, and keeps it. Returns the hash of its
        file. limits: bytes and pixels. Raises ValueError as `decoded` does.
        """
        digest = hashlib.sha256(content).hexdigest()
        if digest not in self._checked:
            decoded(content, limits)
            if self.folder is not None and not (self.folder / digest).exists():
                with whole_file(self.folder / digest) as path:
                    path.write_bytes(content)
            self._checked.add(digest)
        return digest

    def read_too(self, folder: Path) -> None:
        """From now on images that are not in this store's folder are read from `folder`."""
        self._others.append(folder)

    def path(self, digest: str) -> Path:
        """The file of an image, whether it is there or not. Raises RunError where none are kept."""
        if self.folder is None:
            raise RunError(f"image {digest}: this command keeps no images")
        places = [folder / digest for folder in (self.folder, *self._others)]
        return next((place for place in places if place.exists()), places[0])

    def read(self, digest: str) -> bytes:
        """The file of an image. Raises RunError where it is not there, or is another one."""
        path = self.path(digest)
        try:
            content = path.read_bytes()
        except OSError as error:
            raise RunError(f"image {digest} cannot be read: {error}") from error
        if hashlib.sha256(content).hexdigest() != digest:
            raise RunError(f"{path} is damaged: its content has another hash; remove it, resume")
        return content


_current = ImageStore(None)


def image_store() -> ImageStore:
    """Where the images of rows go; in a run its folder, else nowhere."""
    return _current


class MeasuredImages(ImageStore):
    """Keeps nothing but the sizes of images, of which it decodes no pixel."""

    def __init__(self) -> None:
        super().__init__(None)
        self.sizes: dict[str, tuple[int, int]] = {}  # width and height in pixels, by hash

    def add(self, content: bytes, limits: tuple[int, int] = LIMITS) -> str:
        """As ImageStore.add; a file whose pixels are cut off is not noticed."""
        digest = hashlib.sha256(content).hexdigest()
        if digest not in self.sizes:
            self.sizes[digest] = size_of(content)
        return digest


@contextmanager
def images_kept_in(folder: Path, *others: Path) -> Generator[None]:
    """Inside, `image_store` is in `folder`, which is made when the first image comes. others: where
    images are read that are not there.
    """
    store = ImageStore(folder)
    for other in others:
        store.read_too(other)
    with images_in(store):
        yield


@contextmanager
def images_in(store: ImageStore) -> Generator[None]:
    """Inside, `image_store` is `store`."""
    global _current
    before, _current = _current, store
    try:
        yield
    finally:
        _current = before


def kind_of(content: bytes) -> str | None:
    """The format of an image's file by its first bytes, "png" say; None for another one."""
    return next((kind for kind, begins in BEGINNINGS.items() if begins.match(content)), None)


def data_url(content: bytes) -> str:
    """An image's file as an address of its own."""
    data = base64.b64encode(content).decode()
    return f"data:image/{kind_of(content) or 'png'};base64,{data}"


def plain_file(content: bytes) -> bytes:
    """The file of an image; a PNG of its picture where programs differ in what they make of the
    file: of one that is turned, transparent, in a palette, or of another depth. Raises as `decoded`
    does.
    """
    with _opened(content) as picture:
        turned = picture.getexif().get(ORIENTATION, 1) != 1
        if picture.format in PLAIN and picture.mode in ("RGB", "L") and not turned:
            return content
    file = io.BytesIO()
    decoded(content).save(file, "PNG")
    return file.getvalue()


def decoded(content: bytes, limits: tuple[int, int] = LIMITS) -> Any:
    """The picture of a file as a PIL image in RGB, turned as its camera says.

    Raises ValueError for more than `limits`, bytes and pixels, before a pixel is decoded; for a
    file that is broken, cut off, animated or in none of FORMATS; UsageError without Pillow.
    """
    with _opened(content, limits) as picture:
        from PIL import ImageOps

        return _in_rgb(ImageOps.exif_transpose(picture))


def _in_rgb(picture: Any) -> Any:
    if picture.mode.startswith("I"):  # 16 bits of gray, of which Pillow cuts all above 255 to white
        from PIL import Image

        gray = np.asarray(picture, np.int64) >> 8
        picture = Image.fromarray(gray.clip(0, 255).astype(np.uint8))
    elif picture.mode == "P":  # Pillow warns where a palette is transparent
        picture = picture.convert("RGBA")
    return picture.convert("RGB")


def size_of(content: bytes) -> tuple[int, int]:
    """Width and height of `decoded` in pixels, from the head of the file. Raises as that does."""
    with _opened(content) as picture:
        width, height = picture.size
        # Pillow decodes a PNG to look for tags behind its pixels.
        tagged = picture.format != "PNG" or any(mark in content for mark in TAGGED)
        turned = tagged and picture.getexif().get(ORIENTATION, 1) in SIDEWAYS
        return (height, width) if turned else (width, height)


@contextmanager
def _opened(content: bytes, limits: tuple[int, int] = LIMITS) -> Generator[Any]:
    """The picture of a file as Pillow opens it, checked. What goes wrong inside is said too."""
    try:
        from PIL import Image
    except ImportError as error:
        raise UsageError(NEEDED) from error
    most_bytes, most_pixels = limits
    if len(content) > most_bytes:
        raise ValueError(f"its file has {len(content)} bytes, and at most {most_bytes} are read")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # ours is lower
            picture = Image.open(io.BytesIO(content), formats=FORMATS)
            width, height = picture.size
            if width * height > most_pixels:
                raise ValueError(
                    f"it has {width} x {height} pixels, and at most {most_pixels} are read: scale "
                    "it down"
                )
            frames = getattr(picture, "n_frames", 1)
            if frames > 1 and picture.format != "MPO":  # a camera's second picture is a preview
                raise ValueError(f"it is animated, with {frames} frames, and one picture is read")
            yield picture
    except Image.DecompressionBombError as error:
        raise ValueError(
            f"its head says far more than the {most_pixels} pixels that are read: scale it down"
        ) from error
    except Image.UnidentifiedImageError as error:
        raise ValueError(f"it is no image in {', '.join(FORMATS)}") from error
    except (OSError, SyntaxError, EOFError, KeyError, IndexError, OverflowError) as error:
        raise ValueError(f"its file is broken: {error}") from error
