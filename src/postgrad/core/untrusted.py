"""Reads untrusted files: regular ones of a bounded size, JSON and TOML of a bounded depth.

A run directory or a recipe may come from anywhere. Reading a pipe in place of a file would block,
reading a device never end, and JSON of a hundred thousand nested brackets overflow Python's stack,
when it is read or when it is written again. Errors are OSErrors and ValueErrors with messages for
people.
"""

import errno
import json
import os
import re
import stat
import tomllib
from collections.abc import Callable
from io import BufferedReader
from pathlib import Path
from typing import Any, cast

MOST_BYTES = 2**26  # of a file that is read whole
MOST_LINE_BYTES = 2**28  # of one line of a log: a sample of a million tokens has 2^26
MOST_DEPTH = 64  # of JSON: what postgrad writes has 12
_INHERITED = ("/dev/fd/", "/dev/stdin", "/proc/self/fd/")
_MOST_PATH, _MOST_NAME = 4096, 255  # bytes: PATH_MAX and NAME_MAX of Linux
_LONG_NUMBER = re.compile(r"[0-9][0-9_]{4000,}")
_KINDS = (
    (stat.S_ISDIR, "a directory"),
    (stat.S_ISFIFO, "a pipe"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)
GZIP, PARQUET = b"\x1f\x8b", b"PAR1"
CONTENTS = {  # what files often are in place of what their names say, by their first bytes
    b"version https://git-lfs": "a pointer of Git LFS and not the file: git lfs pull fetches it",
    GZIP: "gzip: unpack it, or let the name of JSON lines end in .jsonl.gz",
    PARQUET: "Parquet: let its name end in .parquet",
    b"PK\x03\x04": "a zip archive: unpack it",
    b"\x28\xb5\x2f\xfd": "zstd: unpack it",
    b"BZh": "bzip2: unpack it",
    b"\xfd7zXZ": "xz: unpack it",
    b"\xff\xfe": "UTF-16: save it as UTF-8",
    b"\xfe\xff": "UTF-16: save it as UTF-8",
    **dict.fromkeys(
        (b"<!DOCTYPE html", b"<!doctype html", b"<html"),
        "a web page, such as one that asks for a login: fetch the file itself",
    ),
}


class NotAFile(OSError):
    """A directory, pipe or device in place of a regular file, or a file that is too large."""


def open_file(path: Path, *, pipes: bool = False, links: bool = True) -> BufferedReader:
    """A regular file, opened for reading. pipes: also a pipe that this process inherited, such as a
    shell's <(command). links: also where `path` is a symbolic link to one.

    Raises OSError where there is no such file, NotAFile where it is not a regular file.
    """
    # without O_NONBLOCK, opening a pipe that nobody writes to would block
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK
    try:
        handle = os.open(path, flags if links else flags | os.O_NOFOLLOW)
    except OSError as error:
        if error.errno == errno.ELOOP and not links:
            raise NotAFile(f"{path} is a link, where a file is expected") from error
        raise
    mode = os.fstat(handle).st_mode
    inherited = pipes and str(path).startswith(_INHERITED)
    if stat.S_ISREG(mode) or (inherited and stat.S_ISFIFO(mode)):
        os.set_blocking(handle, True)
        return open(handle, "rb")  # noqa: PTH123
    os.close(handle)
    kind = next((name for is_kind, name in _KINDS if is_kind(mode)), "no file")
    raise NotAFile(f"{path} is {kind}, where a file is expected")


def read_bytes(path: Path, most: int = MOST_BYTES, *, pipes: bool = False) -> bytes:
    """The contents of `open_file`. Raises NotAFile where it has more than `most` bytes."""
    with open_file(path, pipes=pipes) as file:
        content = file.read(most + 1)
    if len(content) > most:
        raise NotAFile(f"{path} has more than {most} bytes, which no file of its kind has")
    return content


def other_content(path: Path, expected: bytes = b"") -> str:
    """What a file is by its first bytes, and what to do: "it is gzip: ...". "" where they are of
    no kind of CONTENTS, or are `expected`, as is right for the file's name. Regular files alone are
    read.
    """
    if not path.is_file():
        return ""
    with path.open("rb") as file:
        start = file.read(32)
    if start[8:9] == b"{":  # safetensors begin with eight bytes of a length, which may be any
        return ""
    kinds = [
        text for first, text in CONTENTS.items() if first != expected and start.startswith(first)
    ]
    return f"it is {kinds[0]}" if kinds else ""


def read_json(
    path: Path,
    most: int = MOST_BYTES,
    pairs: Callable[[list[tuple[str, Any]]], Any] | None = None,
) -> Any:
    """The JSON value of a file. Raises OSError as `read_bytes`, ValueError as `parse_json`."""
    return parse_json(read_bytes(path, most), pairs)


def parse_json(
    text: str | bytes, pairs: Callable[[list[tuple[str, Any]]], Any] | None = None
) -> Any:
    """The value of a JSON text. pairs: builds objects from their keys and values, see json.loads.

    Raises ValueError where it is not JSON, is nested deeper than MOST_DEPTH, or has an integer of
    more digits than Python reads.
    """
    try:
        value = json.loads(text, object_pairs_hook=pairs)
    except RecursionError:
        raise ValueError(f"it is nested more than {MOST_DEPTH} deep") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"it is not UTF-8: {error}") from error
    except json.JSONDecodeError as error:
        raise ValueError(f"it is not JSON: {error}") from error
    except ValueError as error:
        if "integer string conversion" in str(error):
            raise ValueError("it has a whole number of thousands of digits") from None
        raise
    opened = text.count(b"[") + text.count(b"{") if isinstance(text, bytes) else _opened(text)
    if opened > MOST_DEPTH and is_deep(value):
        raise ValueError(f"it is nested more than {MOST_DEPTH} deep")
    return value


def parse_toml(text: str) -> dict[str, Any]:
    """The tables of a TOML text. Raises ValueError, with the line where it is known, where it is
    not TOML, is nested deeper than MOST_DEPTH, or has an integer of thousands of digits.
    """
    try:
        value = tomllib.loads(text)
    except RecursionError:
        value = None
    except tomllib.TOMLDecodeError as error:
        raise ValueError(str(error)) from error
    except ValueError as error:  # of int(): tomllib lets it through, without its line
        long = _LONG_NUMBER.search(text)
        line = text.count("\n", 0, long.start()) + 1 if long else 1
        raise ValueError(f"a whole number of thousands of digits (at line {line})") from error
    if value is None or is_deep(value):
        raise ValueError(f"lists or tables lie more than {MOST_DEPTH} deep in each other")
    return value


def decoded(content: bytes) -> str:
    """UTF-8 content as text, with \\n at line ends and without a byte order mark. Raises ValueError
    with the line where it is not UTF-8.
    """
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise ValueError(f"line {line} is not UTF-8 ({error.reason})") from error
    return text.replace("\r\n", "\n").replace("\r", "\n")


def path_problem(path: str) -> str:
    """Why no file can have that path; "" where one can."""
    if "\0" in path:
        return "it has a NUL character, which no path may have"
    parts = [os.fsencode(part) for part in path.split("/")] if _is_text(path) else []
    if len(path) >= _MOST_PATH or any(len(part) > _MOST_NAME for part in parts):
        return f"it is longer than a path may be ({_MOST_NAME} bytes a name, {_MOST_PATH} in all)"
    return "" if parts else "it has half a surrogate pair, which is no text"


def is_deep(value: Any, most: int = MOST_DEPTH) -> bool:
    """Whether lists and tables are nested deeper than `most`. Does not recurse."""
    layer: list[Any] = [value]
    for _ in range(most):
        inner: list[Any] = []
        for container in layer:
            if isinstance(container, dict):
                inner += cast(dict[str, Any], container).values()
            elif isinstance(container, list):
                inner += cast(list[Any], container)
        layer = [container for container in inner if isinstance(container, dict | list)]
        if not layer:
            return False
    return True


def shown(value: Any, most: int = 60) -> str:
    """A value from a file for a message: short, and on one line."""
    if isinstance(value, int) and not isinstance(value, bool) and value.bit_length() > 256:
        return "a whole number of more than 77 digits"
    if isinstance(value, dict | list):
        count = len(cast(dict[str, Any] | list[Any], value))
        return f"a {'table' if isinstance(value, dict) else 'list'} of {count}"
    text = repr(value)
    return text if len(text) <= most else f"{text[:most]}..."


def readable(path: Path) -> bool:
    """Whether `path` is a regular file. False also for a text that cannot be a path."""
    try:
        return path.is_file()
    except (OSError, ValueError):
        return False


def reason(error: OSError) -> str:
    """Why a file could not be read, without its name."""
    if isinstance(error, NotAFile):
        return str(error)
    if error.errno == errno.ENAMETOOLONG:
        return "its name is longer than this file system takes"
    return error.strerror or str(error)


def _is_text(path: str) -> bool:
    try:
        os.fsencode(path)
    except UnicodeEncodeError:
        return False
    return True


def _opened(text: str) -> int:
    return text.count("[") + text.count("{")
