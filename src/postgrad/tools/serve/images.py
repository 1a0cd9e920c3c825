"""Images of requests: checked, processed once for each hash, and held until their requests end.

A request carries the bytes of an image in base64, or the hash of one in the folder that the server
was started with. Clients name no file and no address: nothing is fetched for them.
"""

import base64
import binascii
import hashlib
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from postgrad.core.errors import RunError, UsageError
from postgrad.core.media import ImageStore, decoded, size_of
from postgrad.models.image_reader import ImageReader
from postgrad.models.images import Pixels
from postgrad.tools.serve.wire import ImagePart, Refusal, ServerLimits


@dataclass(slots=True)
class _Held:
    pixels: Pixels
    requests: int  # that show it

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.pixels.values())


class HeldImages:
    """What the tower takes of the images of open requests, by hash. For several threads.

    folder: where images are that clients name by their hash; None: they may not.
    """

    def __init__(self, reader: ImageReader, limits: ServerLimits, folder: Path | None) -> None:
        self.reader, self.limits = reader, limits
        self.folder = None if folder is None else ImageStore(folder)
        self._lock = threading.RLock()
        self._held: dict[str, _Held] = {}

    @property
    def nbytes(self) -> int:
        """Of all pixels that are held."""
        return sum(held.nbytes for held in self._held.values())

    def pixels(self, digest: str) -> Pixels:
        """Those of an image of an open request. Raises RunError where its request has ended."""
        held = self._held.get(digest)
        if held is None:
            raise RunError(f"image {digest}: its request has ended")
        return held.pixels

    def hold(self, digest: str, content: bytes) -> None:
        """Keeps an image for a request. Raises ValueError where it cannot be read, UsageError where
        the model's processor refuses it, Refusal (503) where no room is left.
        """
        if self._shared(digest):
            return
        pixels = self.reader.show(digest, decoded(content))
        held = _Held(pixels, 1)
        with self._lock:
            if self._shared(digest):  # another thread has read it meanwhile
                return
            most = self.limits.image_bytes
            if self._held and self.nbytes + held.nbytes > most:
                self.reader.forget(digest)
                message = f"images of open requests take {most} bytes already; try again later"
                raise Refusal(503, "busy", message, retry_after=1)
            self._held[digest] = held

    def _shared(self, digest: str) -> bool:
        """Whether an image is held already; then by one more request."""
        with self._lock:
            if digest not in self._held:
                return False
            self._held[digest].requests += 1
            return True

    def release(self, digests: Sequence[str]) -> None:
        """Ends the use of images by one request; those that no other shows are dropped."""
        with self._lock:
            for digest in digests:
                self._held[digest].requests -= 1
                if not self._held[digest].requests:
                    del self._held[digest]
                    self.reader.forget(digest)


class RequestImages:
    """The images of one request, held until it ends, whatever ends it."""

    def __init__(self, held: HeldImages | None) -> None:
        """held: None of a model that reads text alone."""
        self._held = held
        self._digests: list[str] = []
        self._pixels = 0  # of all of them, as they were sent
        self._ended = False
        self._lock = threading.Lock()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with self._lock:  # a thread may still be reading a request that was cut off
            self._ended = True
            if self._held is not None:
                self._held.release(self._digests)
            self._digests = []

    def add(self, part: ImagePart, where: str) -> str:
        """The hash of an image, which is held now. where: its place, for messages. Raises Refusal:
        422 for one that cannot be read or is one too many, 503 where no room is left.
        """
        held = self._held
        if held is None:
            raise Refusal(422, "no_images", f"{where}: this model reads text alone")
        try:
            content = self._content(part, held)
            self._within_limits(content, held.limits, where)
            digest = hashlib.sha256(content).hexdigest()
            held.hold(digest, content)  # without the lock: the end of a request waits for nothing
            with self._lock:
                if not self._ended:
                    self._digests.append(digest)
                    return digest
            held.release([digest])
            raise Refusal(504, "timeout", "the request has ended")
        except (ValueError, UsageError) as error:
            raise Refusal(422, "unreadable_image", f"{where}: {error}") from error

    def _content(self, part: ImagePart, held: HeldImages) -> bytes:
        """The file of an image. Raises ValueError where there is none."""
        if part.base64 is not None:
            try:
                return base64.b64decode(part.base64, validate=True)
            except binascii.Error as error:
                raise ValueError(f"its base64 is broken: {error}") from error
        assert part.sha256 is not None
        if held.folder is None:
            raise ValueError("images are named by hash only where the server has --images DIR")
        try:
            return held.folder.read(part.sha256)
        except RunError as error:  # whose text names the folder
            raise ValueError("the server has no image with this hash") from error

    def _within_limits(self, content: bytes, limits: ServerLimits, where: str) -> None:
        """Counts an image before a pixel of it is decoded."""
        width, height = size_of(content)
        self._pixels += width * height
        if len(self._digests) >= limits.images:
            message = f"{where}: at most {limits.images} images in one request"
            raise Refusal(422, "too_many_images", message)
        if self._pixels > limits.image_pixels:
            message = f"{where}: at most {limits.image_pixels} pixels in the images of one request"
            raise Refusal(422, "too_many_images", message)
