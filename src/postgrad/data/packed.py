"""Rows of a dataset while it is loaded and drawn from, a few bytes of memory for each.

Datasets are larger than memory, and a row as Python objects takes several times the bytes of its
text. So what is needed of rows once they have been read lies in files, from the first megabytes on:
as JSON their messages until they are tokens, and what verifiers get of them; as numbers their
tokens. In memory is where each row begins.
"""

import json
import os
import tempfile
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar, overload

import numpy as np
import orjson
from numpy.typing import NDArray

from postgrad.core.array_files import PIECE, ArrayInFile, OpenFile
from postgrad.core.errors import DiskFull, RunError
from postgrad.core.files import cache_folder, is_full

JsonValue = TypeVar("JsonValue")
_elsewhere: dict[str, str] = {}  # by folder of files: what a person has to hear of it, "" if heard
IN_MEMORY = 2**22  # bytes at the end of StoredBytes; what was added before them lies in a file


class StoredBytes:
    """Bytes that are added one behind the other, and read at any place. The last IN_MEMORY at most
    are in memory, the others in a file without a name: it is gone with this object, or with the
    process. Raises RunError, or DiskFull, where the disk does not take or give them.
    """

    def __init__(self, stored: ArrayInFile | None = None) -> None:
        """stored: where the first bytes are already; nothing can be added then."""
        self._file = None if stored is None else stored.file
        self._begin = 0 if stored is None else stored.begin  # of the first byte, in the file
        self._in_file = 0 if stored is None else stored.nbytes
        self._tail = bytearray()

    def __len__(self) -> int:
        return self._in_file + len(self._tail)

    def add(self, data: bytes | memoryview) -> None:
        """Adds bytes behind the others."""
        self._tail += data
        if len(self._tail) >= IN_MEMORY:
            self._move()

    def read(self, begin: int, end: int) -> bytes:
        """The bytes from `begin` to `end`."""
        first = self._in_file
        if begin >= first:
            return bytes(self._tail[begin - first : end - first])
        assert self._file is not None
        stop = min(end, first)
        try:
            data = self._file.read(self._begin + begin, stop - begin)
        except OSError as error:
            raise RunError(
                f"data that the run has read cannot be read again: {error}; start the run again, "
                "which makes the file anew"
            ) from error
        return data if stop == end else data + self._tail[: end - first]

    def pieces(self) -> Iterator[bytes]:
        """All bytes, in order."""
        for begin in range(0, len(self), PIECE):
            yield self.read(begin, min(begin + PIECE, len(self)))

    def _move(self) -> None:
        """Writes what is in memory to the file."""
        try:
            if self._file is None:
                self._file = _nameless_file()
            self._file.append(self._tail)
        except OSError as error:
            problem = f"the rows of the data cannot be written to the run's file of them: {error};"
            if is_full(error):
                raise DiskFull(
                    f"{problem} free space there, or name a folder of another disk with "
                    "POSTGRAD_CACHE"
                ) from error
            raise RunError(f"{problem} name another folder with POSTGRAD_CACHE") from error
        self._in_file += len(self._tail)
        self._tail = bytearray()


def _nameless_file() -> OpenFile:
    """In the user's cache folder: its disk has to take the token cache too. Where nothing can be
    written there, in the system's folder for temporary files, which often is a part of memory.
    """
    folder, problem = cache_folder("rows"), "there is no home folder"
    if folder is not None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            return _nameless_in(folder)
        except OSError as error:
            problem = str(error)
    elsewhere = tempfile.gettempdir()
    file = _nameless_in(Path(elsewhere))
    _elsewhere.setdefault(
        elsewhere,
        f"the rows' files are in {elsewhere}, which may be a part of memory: {problem}; "
        "POSTGRAD_CACHE names another folder",
    )
    return file


def notes_of_place() -> list[str]:
    """A line where files are not in the user's cache folder; once in a process."""
    notes = [text for text in _elsewhere.values() if text]
    _elsewhere.update(dict.fromkeys(_elsewhere, ""))
    return notes


def _nameless_in(folder: Path) -> OpenFile:
    with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
        return OpenFile(os.dup(file.fileno()), str(folder))


@dataclass(frozen=True, slots=True)
class StoredColumn:
    """A ragged column of N values over S sequences, as Ragged is one, in StoredBytes. What is read
    of it is an array of its own.
    """

    stored: StoredBytes
    dtype: np.dtype[Any]
    offsets: NDArray[np.int64]  # [S + 1], rising from 0 to N

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __iter__(self) -> Iterator[NDArray[Any]]:
        return map(self.row, range(len(self)))

    @property
    def shape(self) -> tuple[int]:
        """The number of values."""
        return (len(self.stored) // self.dtype.itemsize,)

    @property
    def lengths(self) -> NDArray[np.int64]:
        """[S] number of values of each sequence."""
        return np.diff(self.offsets)

    def row(self, i: int) -> NDArray[Any]:
        """The values of sequence i."""
        return self.part(int(self.offsets[i]), int(self.offsets[i + 1]))

    def part(self, begin: int, end: int) -> NDArray[Any]:
        """The values from place `begin` to `end`, whatever sequences they are of."""
        size = self.dtype.itemsize
        return np.frombuffer(bytearray(self.stored.read(begin * size, end * size)), self.dtype)

    def pieces(self) -> Iterator[bytes]:
        """The bytes of all values, in order."""
        return self.stored.pieces()


class PackedTexts:
    """Texts in UTF-8, a line for each."""

    def __init__(self) -> None:
        self.stored = StoredBytes()
        self._ends = array("q")

    def __len__(self) -> int:
        return len(self._ends)

    def add(self, text: bytes) -> None:
        """Adds a text without line breaks."""
        self.stored.add(text + b"\n")
        self._ends.append(len(self.stored))

    def text(self, place: int) -> bytes:
        """The text at `place`, from 0 on."""
        begin = self._ends[place - 1] if place else 0
        return self.stored.read(begin, self._ends[place] - 1)


class PackedJson(PackedTexts, Sequence[JsonValue], Generic[JsonValue]):
    """JSON values, as many as there are rows. They are read as they were added."""

    def __init__(self) -> None:
        super().__init__()
        self._by_json: set[int] = set()  # places of what json has written

    def append(self, value: JsonValue) -> None:
        """Adds a value behind the others."""
        # json takes twenty times as long; but orjson writes 1e400 as null, and refuses half a
        # surrogate pair and integers of more than 64 bits
        try:
            text = orjson.dumps(value)
            same = orjson.loads(text) == value
        except orjson.JSONEncodeError:
            text, same = b"", False
        if not same:
            self._by_json.add(len(self))
            text = json.dumps(value, ensure_ascii=False).encode("utf-8", "surrogatepass")
        self.add(text)

    @overload
    def __getitem__(self, place: int) -> JsonValue: ...
    @overload
    def __getitem__(self, place: slice) -> "list[JsonValue]": ...
    def __getitem__(self, place: int | slice) -> "JsonValue | list[JsonValue]":
        if isinstance(place, slice):
            return [self[i] for i in range(*place.indices(len(self)))]
        place = range(len(self))[place]
        text = self.text(place)
        if place in self._by_json:
            return json.loads(text.decode("utf-8", "surrogatepass"))
        return orjson.loads(text)
