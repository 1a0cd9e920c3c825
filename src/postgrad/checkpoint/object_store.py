"""A folder in an object store, or any other file system that fsspec opens.

What lies there is untrusted: sizes are checked before anything is read. Names are the caller's.
"""

import hashlib
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from postgrad.checkpoint.manifest import Damaged, Entry
from postgrad.core.errors import RunError, UsageError, described
from postgrad.core.files import COPIED_BYTES
from postgrad.core.untrusted import open_file

BLOCK_BYTES, STREAMS = 2**25, 8  # of a large object: read at once, and beside each other
EXTRAS = {"s3": "s3", "s3a": "s3", "gs": "gcs", "gcs": "gcs"}  # of pyproject.toml, by protocol
# They have no folders: to make one would make the bucket that a typing error names.
FOLDERLESS = (*EXTRAS, "az", "abfs", "abfss", "oci", "oss")


class MirrorFailed(RunError):
    """A mirror could not be reached, or did not take what was written to it."""


class Altered(Damaged):
    """An object of the right size whose content is not what its hash says."""


class ObjectStore:
    """Objects by their places below a URL: "checkpoints/step-000010/manifest.json".

    Every method raises MirrorFailed where the store cannot be reached or refuses, and those that
    read raise Damaged where an object is missing.
    """

    def __init__(self, url: str) -> None:
        """Raises UsageError where no file system is of that URL, or its package is missing."""
        from fsspec.core import url_to_fs

        self.url = url.rstrip("/")
        opened: tuple[Any, str]
        try:
            opened = url_to_fs(self.url)
        except ImportError as error:
            raise UsageError(f"checkpoint.mirror = {url!r}: {_missing(url, error)}") from error
        except Exception as error:  # each file system has its own
            raise UsageError(
                f"checkpoint.mirror = {url!r} cannot be opened: {described(error)}"
            ) from error
        self._fs, self._root = opened
        self._has_folders = url.partition("://")[0] not in FOLDERLESS

    def names(self, folder: str) -> dict[str, int]:
        """Sizes in bytes of what lies in a folder, by name; {} where there is no folder."""
        path = self._at(folder)
        try:
            with self._reached(folder):
                self._fs.invalidate_cache()
                entries = self._fs.ls(path, detail=True)
        except Damaged:
            return {}
        sizes: dict[str, int] = {}
        for entry in entries:
            name = str(entry["name"]).rstrip("/")
            if name.strip("/") != path.strip("/"):  # some stores list the folder itself too
                sizes[name.rpartition("/")[2]] = int(entry.get("size") or 0)
        return sizes

    def read(self, place: str, most: int) -> bytes:
        """A small object. Raises Damaged where it has more than `most` bytes."""
        if (size := self._size(place)) > most:
            raise Damaged(f"{self.url}/{place} has {size} bytes, and at most {most} are read")
        with self._reached(place):
            content: bytes = self._fs.cat_file(self._at(place))
        return content[:most]

    def write(self, place: str, content: bytes) -> None:
        """Writes a small object, or replaces one."""
        with self._reached(place, writes=True):
            self._make_folder(place)
            self._fs.pipe_file(self._at(place), content)

    def remove(self, place: str, *, folder: bool = False) -> None:
        """Removes an object, or a `folder` with all that is in it, where it is there."""
        with suppress(Damaged), self._reached(place):
            if folder:
                self._fs.rm(self._at(place), recursive=True)
            else:
                self._fs.rm_file(self._at(place))

    def send(self, path: Path, place: str, entry: Entry) -> None:
        """Uploads a file. Raises Damaged where it is not what `entry` says, OSError where it cannot
        be read.
        """
        digest = hashlib.sha256()
        with open_file(path) as source, self._reached(place, writes=True):
            self._make_folder(place)
            with self._fs.open(self._at(place), "wb") as target:
                while content := source.read(COPIED_BYTES):
                    digest.update(content)
                    target.write(content)
        if digest.hexdigest() != entry.sha256:
            raise Damaged(f"{path} has changed since it was written (its SHA-256 is another)")
        if (size := self._size(place)) != entry.size:
            raise MirrorFailed(
                f"{self.url}/{place} has {size} bytes after {entry.size} were uploaded"
            )

    def receive(self, place: str, entry: Entry, file: BinaryIO) -> None:
        """Appends an object to `file`. Raises Damaged where it is not what `entry` says: Altered
        where only its content differs.
        """
        size = self._size(place)
        if size != entry.size:
            raise Damaged(f"{self.url}/{place} has {size} bytes, and {entry.size} are expected")
        digest, path = hashlib.sha256(), self._at(place)

        def block(start: int) -> bytes:
            return self._fs.cat_file(path, start=start, end=min(start + BLOCK_BYTES, size))

        with ThreadPoolExecutor(STREAMS) as streams:
            for first in range(0, size, STREAMS * BLOCK_BYTES):
                starts = range(first, min(size, first + STREAMS * BLOCK_BYTES), BLOCK_BYTES)
                with self._reached(place):
                    blocks = list(streams.map(block, starts))
                for content in blocks:
                    digest.update(content)
                    file.write(content)
        if digest.hexdigest() != entry.sha256:
            raise Altered(f"{self.url}/{place} is damaged: its SHA-256 is another")

    def _size(self, place: str) -> int:
        with self._reached(place):
            self._fs.invalidate_cache()
            return int(self._fs.info(self._at(place))["size"])

    def _make_folder(self, place: str) -> None:
        if self._has_folders:
            self._fs.makedirs(self._at(place).rpartition("/")[0], exist_ok=True)

    def _at(self, place: str) -> str:
        return f"{self._root.rstrip('/')}/{place}" if place else self._root

    @contextmanager
    def _reached(self, place: str, *, writes: bool = False) -> Generator[None]:
        """Makes a store's errors ours: Damaged for an object that is missing, unless the block
        writes it: then its bucket is.
        """
        try:
            yield
        except Exception as error:  # each store's client has its own
            if isinstance(error, FileNotFoundError) and not writes:
                raise Damaged(f"{self.url}/{place} is missing") from error
            raise MirrorFailed(
                f"checkpoint.mirror {self.url} does not answer as expected, at "
                f"{place or 'its folder'}: {described(error)}"
            ) from error


def _missing(url: str, error: ImportError) -> str:
    """What to install for a URL whose package is not there."""
    extra = EXTRAS.get(url.partition("://")[0])
    how = f"pip install 'postgrad[{extra}]'" if extra else "install it with pip"
    return f"the package that opens it is not installed ({error}): {how}"
