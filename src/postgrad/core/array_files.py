"""Files of arrays with a hash of their content: caches read the bits that were written, or none.

A file is a safetensors file whose header has the hash as `sha256`. Which bytes the hash covers is
the `digest` of each cache. Files may be larger than memory: they are written, hashed and read in
pieces.
"""

import errno
import hashlib
import itertools
import json
import math
import os
import re
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from postgrad.core.files import whole_file

HASH_KEY = "sha256"  # in the header's metadata
SYSTEM_ERROR = re.compile(r"\(os error (\d+)\)", re.ASCII)
PIECE = 2**20  # bytes that are read at once
DTYPES = {"BOOL": "?", "I32": "<i4", "I64": "<i8", "F32": "<f4"}  # as safetensors calls them


class OpenFile:
    """A file that is read at any place, for as long as anybody has this object: also after it was
    deleted, or replaced by another one.

    It is read by calls and not mapped into memory. Where it was cut, or a server has lost it, a
    read is an OSError; a map would end the process (SIGBUS).
    """

    def __init__(self, handle: int, name: str) -> None:
        """handle: a descriptor, which is closed with this object. name: for messages."""
        self._handle, self._name = handle, name
        weakref.finalize(self, os.close, handle).atexit = False  # threads may still read

    @classmethod
    def of(cls, path: Path) -> "OpenFile":
        """Opens a file to read."""
        return cls(os.open(path, os.O_RDONLY), str(path))

    @property
    def size(self) -> int:
        """Bytes of the file."""
        return os.fstat(self._handle).st_size

    def append(self, data: bytes | bytearray) -> None:
        """Writes behind what was written before. Raises OSError that names the file."""
        left = memoryview(data)
        try:
            while left:
                left = left[os.write(self._handle, left) :]
        except OSError as error:
            error.filename = self._name
            raise

    def read(self, begin: int, count: int) -> bytes:
        """So many bytes from `begin` on. Raises OSError that names the file, also where it lacks
        them.
        """
        try:
            data = os.pread(self._handle, count, begin)
            while len(data) < count:
                more = os.pread(self._handle, count - len(data), begin + len(data))
                if not more:
                    raise OSError(errno.EIO, f"it was cut to {begin + len(data)} bytes")
                data += more
        except OSError as error:
            error.filename = self._name
            raise
        return data


class ArrayInPieces(Protocol):
    """A one-dimensional array that is read in pieces."""

    @property
    def dtype(self) -> np.dtype[Any]:
        """The type of the values."""
        ...

    @property
    def shape(self) -> tuple[int, ...]:
        """The number of values alone."""
        ...

    def pieces(self) -> Iterator[bytes | bytearray]:
        """The bytes of the values, in order."""
        ...


@dataclass(frozen=True, slots=True)
class ArrayInFile:
    """An array in a file of several."""

    file: OpenFile
    begin: int  # its first byte in the file
    dtype: np.dtype[Any]
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the values."""
        return bytes_of(self)

    def pieces(self) -> Iterator[bytes]:
        """The bytes of the values, in order."""
        end = self.begin + self.nbytes
        for begin in range(self.begin, end, PIECE):
            yield self.file.read(begin, min(PIECE, end - begin))

    def array(self) -> NDArray[Any]:
        """All values, in memory."""
        return np.frombuffer(bytearray().join(self.pieces()), self.dtype).reshape(self.shape)


Arrays = Mapping[str, NDArray[Any] | ArrayInPieces]
Digest = Callable[[Arrays], str]


def pieces_of(values: NDArray[Any] | ArrayInPieces) -> Iterator[Any]:
    """The bytes of an array, in order."""
    if not isinstance(values, np.ndarray):
        return values.pieces()
    return iter([np.ascontiguousarray(values).data])


def digest_of(arrays: Arrays) -> str:
    """SHA-256 (hex) over names, dtypes, shapes and values."""
    digest = hashlib.sha256()
    for name in sorted(arrays):
        values = arrays[name]
        digest.update(f"{name} {values.dtype} {values.shape}\n".encode())
        for piece in pieces_of(values):
            digest.update(piece)
    return digest.hexdigest()


def write_arrays(path: Path, arrays: Arrays, digest: Digest = digest_of) -> None:
    """Writes a file with the hash of its content, whole or not at all. Raises OSError."""
    codes = {np.dtype(dtype): code for code, dtype in DTYPES.items()}
    # as safetensors has them: wide values first, so that all are aligned
    names = sorted(arrays, key=lambda name: (-arrays[name].dtype.itemsize, name))
    shapes = {name: (codes[arrays[name].dtype], arrays[name].shape) for name in names}
    sizes = [bytes_of(arrays[name]) for name in names]
    head = head_of(shapes, sizes, {HASH_KEY: digest(arrays)})
    with whole_file(path) as written, written.open("wb") as file:
        file.write(head)
        for name in names:
            for piece in pieces_of(arrays[name]):
                file.write(piece)


def bytes_of(values: "NDArray[Any] | ArrayInPieces") -> int:
    """Bytes of the values of an array."""
    return math.prod(values.shape) * values.dtype.itemsize


def head_of(
    tensors: Mapping[str, tuple[str, Sequence[int]]],
    sizes: Sequence[int],
    metadata: Mapping[str, str],
) -> bytes:
    """What a safetensors file has before the values of its tensors. tensors: of each in the order
    of the file the dtype, as safetensors calls it, and the shape. sizes: their bytes.
    """
    header: dict[str, Any] = {"__metadata__": metadata}
    ends = itertools.accumulate(sizes)
    for (name, (dtype, shape)), size, end in zip(tensors.items(), sizes, ends, strict=True):
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [end - size, end]}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def open_arrays(path: Path, digest: Digest = digest_of) -> dict[str, ArrayInFile]:
    """The arrays of a file by name, which stay there. They are read once, to compare their hash:
    they have the bits that were written.

    Raises FileNotFoundError where there is no file, ValueError where its content is damaged, and
    other OSErrors where it cannot be read.
    """
    file = OpenFile.of(path)
    try:
        opened: Any = safe_open(path, "np")  # its types are unknown
        with opened as header:
            metadata: dict[str, str] = header.metadata() or {}
            slices = [(name, header.get_slice(name)) for name in header.offset_keys()]
            kinds = [(np.dtype(DTYPES[part.get_dtype()]), part.get_shape()) for _, part in slices]
        arrays: dict[str, ArrayInFile] = {}
        end = file.size  # arrays are the end of the file, without gaps
        for (name, _), (dtype, shape) in zip(reversed(slices), reversed(kinds), strict=True):
            end -= math.prod(shape) * dtype.itemsize
            arrays[name] = ArrayInFile(file, end, dtype, tuple(shape))
        now = digest(arrays)
    except (SafetensorError, KeyError) as error:
        raise ValueError(str(error)) from error
    if now != metadata.get(HASH_KEY):
        raise ValueError("its content has another hash than when it was written")
    return arrays


def read_arrays(path: Path, digest: Digest = digest_of) -> dict[str, NDArray[Any]]:
    """The arrays of a file by name, in memory. Raises as `open_arrays` does."""
    return {name: array.array() for name, array in open_arrays(path, digest).items()}


def disk_error(error: SafetensorError) -> OSError:
    """What safetensors raises for a disk that takes no more, as the error of the system. Its text
    ends with the system's number: "No space left on device (os error 28)".
    """
    number = SYSTEM_ERROR.search(str(error))
    return OSError(int(number[1]) if number else errno.EIO, str(error))
