"""Files of lines that are only appended to, plain or compressed: gzip members, one for each append.

The content of members in a row is one gzip file, which gunzip and zcat read. Each member names its
sizes in an extra field of its header (RFC 1952, 2.3.1.1), as in BGZF: so a reader finds a line
without unpacking what lies before it, and a file can be cut at any append.
"""

import io
import struct
import zlib
from bisect import bisect_right
from io import BufferedReader
from pathlib import Path
from typing import Any

from postgrad.core.errors import RunError
from postgrad.core.untrusted import open_file, readable

SUFFIX = ".gz"
LEVEL = 4  # 6 takes twice the time for 3% less
MOST_MEMBER = 2**30  # bytes, unpacked: a step of samples has a hundredth
# Magic, deflate, an extra field, no time, no hint, unknown system; length of the extra field; its
# name, length, and the bytes of the whole member and of its content.
_HEAD = struct.Struct("<4sIBBH2sHQQ")
_MAGIC = b"\x1f\x8b\x08\x04"
_NAME = b"pg"
_TAIL = struct.Struct("<II")


def member(content: bytes) -> bytes:
    """`content` as one gzip member. Equal contents give equal bytes."""
    packer = zlib.compressobj(LEVEL, zlib.DEFLATED, -zlib.MAX_WBITS)
    packed = packer.compress(content) + packer.flush()
    size = _HEAD.size + len(packed) + _TAIL.size
    head = _HEAD.pack(_MAGIC, 0, 0, 255, 20, _NAME, 16, size, len(content))
    return head + packed + _TAIL.pack(zlib.crc32(content), len(content) & 0xFFFFFFFF)


def open_lines(path: Path) -> BufferedReader:
    """The lines of `path`, or of `path`.gz where that is there in its place, opened for reading at
    positions in the unpacked content. A member that is still being written is left out.

    Raises OSError as `open_file`, and RunError where a compressed file is damaged.
    """
    compressed = path.with_name(path.name + SUFFIX)
    if not readable(path) and readable(compressed):
        return BufferedReader(_Members(compressed))  # pyright: ignore[reportArgumentType]
    return open_file(path)


def has_lines(path: Path) -> bool:
    """Whether `open_lines` finds a file."""
    return readable(path) or readable(path.with_name(path.name + SUFFIX))


class _Members(io.RawIOBase):
    """The unpacked content of a file of members; one of them is in memory at a time."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._path = path
        self._file = open_file(path)
        self._places: list[tuple[int, int]] = []  # of each member: its first byte, and its bytes
        self._starts = [0]  # of each member in the content; at last the content's end
        self._at = 0
        self._unpacked: tuple[int, bytes] = (-1, b"")
        self._find_members()

    def _find_members(self) -> None:
        end = self._file.seek(0, io.SEEK_END)
        place = 0
        while place < end:
            self._file.seek(place)
            head = self._file.read(_HEAD.size)
            if head[:4] != _MAGIC[: len(head)]:
                raise self._damaged(place, "is no member that postgrad writes")
            if len(head) < _HEAD.size:
                break
            _, _, _, _, _, name, _, size, content = _HEAD.unpack(head)
            if name != _NAME or content > MOST_MEMBER:
                raise self._damaged(place, "is no member that postgrad writes")
            if size <= _HEAD.size or place + size > end:
                break
            self._places.append((place, size))
            self._starts.append(self._starts[-1] + content)
            place += size

    def _damaged(self, place: int, why: str) -> RunError:
        return RunError(
            f"{self._path}: what begins at byte {place} {why}; copy the file again from where the "
            f"run was, or unpack it with gunzip as {self._path.name.removesuffix(SUFFIX)}"
        )

    def _content(self, number: int) -> bytes:
        if self._unpacked[0] != number:
            place, size = self._places[number]
            wanted = self._starts[number + 1] - self._starts[number]
            self._file.seek(place + _HEAD.size)
            packed = self._file.read(size - _HEAD.size)
            unpacker = zlib.decompressobj(-zlib.MAX_WBITS)
            try:
                content = unpacker.decompress(packed, wanted + 1)
            except zlib.error as error:
                raise self._damaged(place, f"is damaged ({error})") from error
            checked = _TAIL.pack(zlib.crc32(content), wanted & 0xFFFFFFFF)
            if len(content) != wanted or packed[-_TAIL.size :] != checked:
                raise self._damaged(place, "is damaged: its checksum differs")
            self._unpacked = number, content
        return self._unpacked[1]

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._starts[-1]}[whence]
        self._at = max(0, base + offset)
        return self._at

    def readinto(self, buffer: Any) -> int:
        if self._at >= self._starts[-1]:
            return 0
        number = bisect_right(self._starts, self._at) - 1
        start = self._at - self._starts[number]
        view = memoryview(buffer)
        piece = self._content(number)[start : start + len(view)]
        view[: len(piece)] = piece
        self._at += len(piece)
        return len(piece)

    def close(self) -> None:
        self._file.close()
        super().close()
