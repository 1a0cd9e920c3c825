"""Images by their content: what is read, what is refused undecoded, and what is kept."""

import hashlib
import io
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
import pytest
from PIL import Image
from PIL.PngImagePlugin import PngImageFile

from helpers.image_directories import bomb
from postgrad.core.errors import RunError
from postgrad.core.media import (
    MOST_PIXELS,
    ImageStore,
    MeasuredImages,
    decoded,
    image_store,
    images_kept_in,
    plain_file,
    size_of,
)


def file_of(picture: Any, format: str = "PNG", **options: Any) -> bytes:
    file = io.BytesIO()
    picture.save(file, format, **options)
    return file.getvalue()


def picture(width: int = 3, height: int = 2, mode: str = "RGB") -> Any:
    return Image.new(mode, (width, height), 200)


@pytest.mark.parametrize(("format", "mode"), [("PNG", "RGB"), ("JPEG", "L"), ("WEBP", "RGB")])
def test_a_file_that_every_program_reads_alike_is_sent_as_it_is(format: str, mode: str) -> None:
    content = file_of(picture(mode=mode), format)
    assert plain_file(content) == content


@pytest.mark.parametrize(
    ("format", "mode", "way"),
    [("PNG", "RGBA", 1), ("PNG", "P", 1), ("PNG", "I;16", 1), ("GIF", "P", 1), ("BMP", "RGB", 1),
     ("JPEG", "CMYK", 1), ("JPEG", "RGB", 6), ("WEBP", "RGBA", 1)],
)  # fmt: skip
def test_any_other_file_is_sent_as_the_picture_that_is_read_of_it(
    format: str, mode: str, way: int
) -> None:
    tags = Image.Exif()
    tags[0x0112] = way
    content = file_of(picture(mode=mode), format, **({"exif": tags} if way > 1 else {}))
    sent = plain_file(content)
    assert sent != content
    with Image.open(io.BytesIO(sent)) as shown:
        assert (shown.format, shown.mode, dict(shown.getexif())) == ("PNG", "RGB", {})
        np.testing.assert_array_equal(np.asarray(shown), np.asarray(decoded(content)))


@pytest.mark.parametrize("format", ["PNG", "JPEG", "WEBP", "GIF", "BMP"])
def test_every_format_gives_its_pixels(format: str) -> None:
    pixels = np.asarray(decoded(file_of(picture(), format)))
    assert pixels.shape == (2, 3, 3)
    assert np.abs(pixels.astype(int) - [200, 0, 0]).max() <= 4  # what JPEG and WEBP lose


def test_a_picture_is_turned_as_its_camera_says() -> None:
    tags = Image.Exif()
    tags[0x0112] = 6  # a quarter turn
    assert decoded(file_of(picture(3, 2), "JPEG", exif=tags)).size == (2, 3)


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "it is no image in PNG, JPEG"),
        (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "it is no image in PNG, JPEG"),
        (file_of(picture(40, 40))[:70], "its file is broken: "),
        (file_of(picture(400, 400), "JPEG")[:900], "its file is broken: "),
        (file_of(picture(), "TIFF"), "it is no image in PNG, JPEG"),
        (bomb(20_000, 5_000), f"it has 20000 x 5000 pixels, and at most {MOST_PIXELS} are read"),
        (bomb(100_000, 100_000),
         f"its head says far more than the {MOST_PIXELS} pixels that are read: scale it down"),
        (file_of(picture(), "GIF", save_all=True, append_images=[Image.new("RGB", (3, 2), 9)]),
         "it is animated, with 2 frames"),
        (bytes(2**26 + 1), "its file has 67108865 bytes"),
    ],
)  # fmt: skip
def test_what_is_no_picture_says_why(content: bytes, why: str) -> None:
    with pytest.raises(ValueError) as raised:
        decoded(content)
    assert why in str(raised.value)


def test_gray_of_16_bits_keeps_its_shades() -> None:
    gray = np.array([[0, 255, 256, 32768, 65535]], np.uint16)
    content = file_of(Image.fromarray(gray))
    pixels = np.asarray(decoded(content))
    assert pixels[0, :, 0].tolist() == [0, 0, 1, 128, 255]
    assert pixels.shape == (1, 5, 3)


@pytest.mark.filterwarnings("error")
def test_a_transparent_palette_gives_its_colours_without_a_warning() -> None:
    palette = Image.fromarray(np.arange(6, dtype=np.uint8).reshape(2, 3)).quantize(6)
    content = file_of(palette, transparency=bytes([0, 128, 255, 255, 255, 255]))
    np.testing.assert_array_equal(np.asarray(decoded(content)), np.asarray(palette.convert("RGB")))


def turned(way: int) -> Any:
    tags = Image.Exif()
    tags[0x0112] = way
    return tags


def behind_the_pixels(content: bytes, tags: Any) -> bytes:
    """A PNG whose tags are its last chunk."""
    data = tags.tobytes()[6:]
    chunk = b"eXIf" + data
    return content[:-12] + len(data).to_bytes(4) + chunk + crc32(chunk).to_bytes(4) + content[-12:]


MANY = {
    **{f"jpeg {way}": file_of(picture(), "JPEG", exif=turned(way)) for way in range(10)},
    "png": file_of(picture()),
    "png 5": file_of(picture(), exif=turned(5)),
    "png 8, behind the pixels": behind_the_pixels(file_of(picture()), turned(8)),
    "webp 6": file_of(picture(), "WEBP", exif=turned(6)),
    "gif": file_of(picture(), "GIF"),
    "16 bits": file_of(Image.fromarray(np.zeros((2, 3), np.uint16))),
    "palette": file_of(picture().quantize(4), transparency=1),
    "CMYK": file_of(picture(mode="CMYK"), "JPEG"),
}


@pytest.mark.parametrize("name", MANY)
def test_a_measured_image_has_the_size_of_the_decoded_one(name: str) -> None:
    store = MeasuredImages()
    assert store.sizes[store.add(MANY[name])] == decoded(MANY[name]).size


def test_a_measured_png_is_not_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    content = file_of(picture(400, 300))
    monkeypatch.setattr(PngImageFile, "load", None)
    assert size_of(content) == (400, 300)


def test_an_image_is_kept_once_under_its_hash(tmp_path: Path) -> None:
    content = file_of(picture())
    with images_kept_in(tmp_path / "images"):
        digest = image_store().add(content)
        assert image_store().add(content) == digest == hashlib.sha256(content).hexdigest()
        assert image_store().read(digest) == content
    assert [file.name for file in (tmp_path / "images").iterdir()] == [digest]
    assert image_store().add(content) == digest  # outside it is checked, and not kept
    with pytest.raises(RunError, match="keeps no images"):
        image_store().read(digest)


def test_a_damaged_or_lost_image_is_an_error(tmp_path: Path) -> None:
    store = ImageStore(tmp_path)
    digest = store.add(file_of(picture()))
    (tmp_path / digest).write_bytes(file_of(picture(9, 9)))
    with pytest.raises(RunError, match="is damaged"):
        store.read(digest)
    (tmp_path / digest).unlink()
    with pytest.raises(RunError, match="cannot be read"):
        store.read(digest)


def test_images_of_another_folder_are_read_and_not_copied(tmp_path: Path) -> None:
    content = file_of(picture())
    other, ours = ImageStore(tmp_path / "other"), ImageStore(tmp_path / "ours")
    digest = other.add(content)
    with pytest.raises(RunError, match="cannot be read"):
        ours.read(digest)
    ours.read_too(tmp_path / "other")
    assert ours.read(digest) == content
    assert ours.path(digest) == tmp_path / "other" / digest
    assert not (tmp_path / "ours").exists()
    (tmp_path / "other" / digest).write_bytes(b"another")
    with pytest.raises(RunError, match="damaged"):
        ours.read(digest)
