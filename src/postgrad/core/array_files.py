"""Files of arrays with a hash of their content: caches read the bits that were written, or none.

A file is a safetensors file whose header has the hash as `sha256`. Which bytes the hash covers is
the `digest` of each cache.
"""

import errno
import hashlib
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file  # pyright: ignore[reportUnknownVariableType]

from postgrad.core.files import whole_file

HASH_KEY = "sha256"  # in the header's metadata
SYSTEM_ERROR = re.compile(r"\(os error (\d+)\)", re.ASCII)
Arrays = Mapping[str, np.ndarray[Any, Any]]
Digest = Callable[[Arrays], str]


def digest_of(arrays: Arrays) -> str:
    """SHA-256 (hex) over names, dtypes, shapes and values."""
    digest = hashlib.sha256()
    for name in sorted(arrays):
        values = arrays[name]
        digest.update(f"{name} {values.dtype} {values.shape}\n".encode())
        digest.update(np.ascontiguousarray(values).data)
    return digest.hexdigest()


def write_arrays(path: Path, arrays: Arrays, digest: Digest = digest_of) -> None:
    """Writes a file with the hash of its content, whole or not at all. Raises OSError."""
    with whole_file(path) as written:
        try:
            save_file(dict(arrays), written, {HASH_KEY: digest(arrays)})
        except SafetensorError as error:
            raise disk_error(error) from error


def read_arrays(path: Path, digest: Digest = digest_of) -> dict[str, np.ndarray[Any, Any]]:
    """The arrays of a file by name, with the bits that were written.

    Raises FileNotFoundError where there is no file, ValueError where its content is damaged, and
    other OSErrors where it cannot be read.
    """
    try:
        opened: Any = safe_open(path, "np")  # its types are unknown
        with opened as file:
            arrays: dict[str, np.ndarray[Any, Any]] = {
                name: file.get_tensor(name)
                for name in file.keys()  # noqa: SIM118
            }
            header: dict[str, str] = file.metadata() or {}
        digest_now = digest(arrays)
    except (SafetensorError, KeyError) as error:
        raise ValueError(str(error)) from error
    if digest_now != header.get(HASH_KEY):
        raise ValueError("its content has another hash than when it was written")
    return arrays


def disk_error(error: SafetensorError) -> OSError:
    """What safetensors raises for a disk that takes no more, as the error of the system. Its text
    ends with the system's number: "No space left on device (os error 28)".
    """
    number = SYSTEM_ERROR.search(str(error))
    return OSError(int(number[1]) if number else errno.EIO, str(error))
