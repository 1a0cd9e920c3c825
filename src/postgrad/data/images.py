"""Images of rows: in content parts of messages, or in a column of their own.

A text has a MARK where an image stands, and its message lists them under `images`: first as the row
names them, then, once read and checked, by the hash of their file (core/media.py).
"""

import base64
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlparse

import numpy as np
from numpy.typing import NDArray

from postgrad.core.errors import UsageError
from postgrad.core.files import is_file
from postgrad.core.media import MARK, MOST_BYTES, data_url, image_store
from postgrad.core.records import PlacedImage
from postgrad.data.answer_spans import Rendered, Unmarkable
from postgrad.data.chat_format import EMPTY, Message
from postgrad.data.rows import Row, shown
from postgrad.data.settings import RowSettings
from postgrad.models.rendering import in_parts

if TYPE_CHECKING:
    from postgrad.models.image_reader import ImageReader  # imports torch

REMOTE = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
BASE64 = re.compile(r"[A-Za-z0-9+/_-]{64,}={0,2}\s*")  # no file is called so
# how base64 of PNG, JPEG, WEBP and GIF begins; the last: no name of a file is so long
INTENDED = re.compile(r"iVBORw0K|/9j/|UklGR|R0lGOD|[^/]{256}")


def with_images(messages: list[Message], row: Row, settings: RowSettings) -> list[Message]:
    """`messages` with their images read, checked and named by hash.

    Parts of messages without a source take the images of the column data.images, in order. Where no
    message has an image and the column has some, they stand before the first text of the user, as
    TRL puts them. Raises UsageError that names row and image for one that is missing, broken, too
    large or remote, and where there are more of them than places or fewer.
    """
    column = _column(row, settings)
    if column and not any("images" in message for message in messages):
        messages = _in_front(messages, len(column), row, settings)
    waiting = list(column)
    read: list[Message] = []
    for message in messages:
        if "images" not in message:
            read.append(message)
            continue
        sources = [waiting.pop(0) if s is None and waiting else s for s in message["images"]]
        read.append({**message, "images": [_digest(source, row) for source in sources]})
    if waiting:
        raise UsageError(
            f"{row.place}: row {row.index} has {len(column)} images in column {settings.images!r} "
            f"(data.images), and its messages have places for {len(column) - len(waiting)}"
        )
    return read


def images_in(messages: Sequence[Message]) -> list[str]:
    """The hashes of the images of messages, in order."""
    return [digest for message in messages for digest in message.get("images", ())]


def placed_in(
    row: Row, ids: NDArray[np.int32], digests: Sequence[str], reader: "ImageReader"
) -> tuple[PlacedImage, ...]:
    """The first images of a row, as many as are among its tokens `ids` [T]. Raises UsageError where
    the tokens are not those of whole images.
    """
    images = reader.placed(ids, digests)
    if images is None:
        raise UsageError(
            f"{row.place}: the tokens of row {row.index} are not those of its {len(digests)} "
            "images: the tokenizer, the image processor and the config have to be of one model"
        )
    return images


def with_image_texts(
    texts: Sequence[Rendered], messages: Sequence[Message], reader: "ImageReader"
) -> list[Rendered]:
    """The texts of a conversation with what the model reads in place of each placeholder that its
    chat template wrote for an image. A text shows the images of the first messages.

    Raises Unmarkable where the template does not write one placeholder for each image, where
    somebody else wrote one, and where the model's image processor refuses an image.
    """
    marks = {reader.placeholder, reader.token}
    for number, message in enumerate(messages):
        if written := [mark for mark in marks if mark in str(message)]:
            raise Unmarkable(f"message {number} has {written[0]!r}, which stands for an image")
    digests = images_in(messages)
    if reader.single and len(digests) > 1:
        raise Unmarkable(
            f"it has {len(digests)} images, and this type of model makes other tokens of an image "
            "where a conversation has several, which is not supported: give each an image"
        )
    most = max((text.text.count(reader.placeholder) for text in texts), default=0)
    if most > len(digests) or (len(texts) == 1 and most < len(digests)):
        raise Unmarkable(
            f"the chat template writes {most} times {reader.placeholder!r}, and there are "
            f"{len(digests)} images"
        )
    return [_with_texts(text, digests, reader) for text in texts]


def _with_texts(rendered: Rendered, digests: Sequence[str], reader: "ImageReader") -> Rendered:
    places = [match.start() for match in re.finditer(re.escape(reader.placeholder), rendered.text)]
    try:
        written = [reader.text(digest).text for digest, _ in zip(digests, places, strict=False)]
    except UsageError as error:  # a picture that the image processor refuses; its row is not known
        raise Unmarkable(str(error)) from error
    grown = [len(text) - len(reader.placeholder) for text in written]

    def moved(at: int) -> int:
        return at + sum(more for place, more in zip(places, grown, strict=True) if place < at)

    text = _filled(rendered.text, reader.placeholder, written)
    spans = tuple((moved(start), moved(end)) for start, end in rendered.spans)
    prompt = _filled(rendered.prompt, reader.placeholder, written)
    return Rendered(text, spans, prompt, rendered.weights)


def _filled(text: str, placeholder: str, written: Sequence[str]) -> str:
    first, *rest = text.split(placeholder)
    return first + "".join(
        image + after for image, after in zip(written[: len(rest)], rest, strict=True)
    )


def sent_message(
    message: Mapping[str, Any], read: Callable[[str], bytes] | None = None
) -> dict[str, Any]:
    """A message in OpenAI's interface, whose images are parts with data URLs. read: the file of an
    image by its hash, else that of the store.
    """
    if "images" not in message:
        return dict(message)
    sent, parts = in_parts(message), list[dict[str, Any]]()
    images = iter(message["images"])
    for part in sent["content"]:
        if part["type"] == "image":
            data = data_url((read or image_store().read)(next(images)))
            part = {"type": "image_url", "image_url": {"url": data}}
        parts.append(part)
    return sent | {"content": parts}


def identified(message: Message) -> str:
    """A message's text with the hashes of its images: two questions are equal if both are."""
    text: str = message["content"]
    for digest in message.get("images", ()):
        text = text.replace(MARK, f"<image {digest}>", 1)
    return text


def _column(row: Row, settings: RowSettings) -> list[Any]:
    """The images in a row's column, which holds a list of them, or one."""
    value = row.values.get(settings.images) if settings.images else None
    if value in EMPTY:
        return []
    images = value if isinstance(value, list) else [value]
    return [image for image in images if image is not None]


def _in_front(
    messages: Sequence[Message], count: int, row: Row, settings: RowSettings
) -> list[Message]:
    """`messages` with places for images before the first text of the user."""
    placed = list(messages)
    for number, message in enumerate(placed):
        if message["role"] == "user":
            if MARK in message["content"]:
                raise UsageError(
                    f"{row.place}: a text of row {row.index} has U+FFFC, which stands for an image "
                    "here: remove it"
                )
            text = MARK * count + message["content"]
            placed[number] = {**message, "content": text, "images": [None] * count}
            return placed
    raise UsageError(
        f"{row.place}: row {row.index} has images in column {settings.images!r}, and no message of "
        'the user where they could stand (data.images; "" reads no such column)'
    )


def _digest(source: Any, row: Row) -> str:
    try:
        return image_store().add(content_of(source, row.folder))
    except ValueError as error:
        raise UsageError(
            f"{row.place}: an image of row {row.index} ({shown(source)}) cannot be read: {error}"
        ) from error


def content_of(source: Any, folder: Path | None) -> bytes:
    """The file of an image: bytes, base64, a data URL, or a name in `folder`; None: names are
    refused. Raises ValueError that says why there is none.
    """
    if isinstance(source, Mapping):  # the hub's Image feature, and OpenAI's image_url
        for key in ("bytes", "url", "path"):
            if source.get(key) not in EMPTY:
                return content_of(source[key], folder)
    if isinstance(source, bytes):
        return source
    if source is None:
        raise ValueError("a message has a place for it, and the row has no further image")
    if not isinstance(source, str) or not source:
        raise ValueError("an image is a file name, base64, a data URL, or bytes with their path")
    if source.startswith("data:"):
        head, _, text = source.partition(",")
        if not head.endswith(";base64"):
            raise ValueError("its data URL is not in base64")
        return _from_base64(text)
    if source.startswith("file://"):
        source = unquote(urlparse(source).path)
    elif REMOTE.match(source):
        raise ValueError(
            "it is elsewhere, and nothing is fetched: give the image itself, as a data URL"
            if folder is None
            else "it is elsewhere, and nothing is fetched while rows are read: download it first, "
            "and name the file"
        )
    elif BASE64.fullmatch(source):
        return _from_base64(source)
    if INTENDED.match(source) and not _is_there(source, folder):
        return _from_base64(source)
    return _file(Path(source), folder)


def _is_there(name: str, folder: Path | None) -> bool:
    return folder is not None and is_file(folder / name)


def _from_base64(text: str) -> bytes:
    try:
        return base64.b64decode(text.strip().replace("-", "+").replace("_", "/"), validate=True)
    except ValueError as error:  # binascii.Error, and what is not ASCII
        other = re.search(r"[^A-Za-z0-9+/_=-]", text.strip())
        why = f"character {other.start()} is {other[0]!r}" if other else str(error)
        raise ValueError(f"its base64 is broken: {why}") from error


def _file(path: Path, folder: Path | None) -> bytes:
    if folder is None:
        raise ValueError("it is a file name, and only rows of a file on this machine have files")
    path = folder / path
    try:
        if not path.is_file():
            raise ValueError(f"there is no file {path}")
        if path.stat().st_size > MOST_BYTES:
            raise ValueError(f"{path} has more than {MOST_BYTES} bytes")
        return path.read_bytes()
    except OSError as error:
        raise ValueError(str(error)) from error
